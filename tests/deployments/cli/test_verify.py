"""`trialflow checkpoints verify` names every file that differs from the manifest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.deployments.cli.stored import UUIDS, run
from tests.trial_core.checkpoint.retention.test_shared_files import save
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.store import CheckpointStore

SHARED = "base/frozen weights.pt"


def path_of(tmp_path: Path, manifest: Manifest, file: int) -> Path:
    folder = tmp_path / "storage" / "checkpoints" / manifest.uuid
    return folder / manifest.files[file].path


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def verified(tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """The exit code, and the output of --json."""
    code = run(tmp_path, "verify", *arguments, "--json")
    return code, json.loads(capsys.readouterr().out)["checkpoints"]


def test_intact_checkpoints(
    stored: list[Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 0, and a line for each checkpoint."""
    assert run(tmp_path, "verify", "--all") == 0
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["state", "uuid", "trial", "batches", "files", "size"]
    assert [row.split()[:3] for row in rows] == [
        ["whole", "aaaaaaab", "gpt-11"],
        ["whole", "aaaaaaaa", "gpt-7"],
    ]


def test_a_flipped_bit(
    stored: list[Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1; the output names the file, its rank, the expected and the seen digest."""
    victim = stored[0].files[1]
    flip_a_bit(path_of(tmp_path, stored[0], 1))
    assert run(tmp_path, "verify", *UUIDS) == 1
    shown = capsys.readouterr().out
    assert f"{victim.path}, written by rank 3, has digest sha256:" in shown
    assert f"expected {victim.digest}" in shown
    assert shown.splitlines()[2].split()[:2] == ["damaged", "aaaaaaaa"]
    assert shown.rstrip().endswith("1 of 2 checkpoints damaged")


def test_damage_as_json(
    stored: list[Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output lists every damaged file, with expected and seen size and digest."""
    flipped, cut = path_of(tmp_path, stored[0], 1), path_of(tmp_path, stored[0], 2)
    flip_a_bit(flipped)
    cut.write_bytes(cut.read_bytes()[:-1])
    path_of(tmp_path, stored[1], 0).unlink()
    code, found = verified(tmp_path, capsys, *UUIDS)
    assert code == 1
    assert [each["is_whole"] for each in found] == [False, False]
    damage = {(each["path"], each["rank"]): each for one in found for each in one["damage"]}
    first, second, third = stored[0].files[1], stored[1].files[0], stored[0].files[2]
    assert set(damage) == {(first.path, 3), (second.path, 3), (third.path, 3)}
    assert damage[first.path, 3]["expected_digest"] == first.digest
    assert damage[first.path, 3]["seen_digest"] not in (first.digest, None)
    assert damage[second.path, 3]["seen_bytes"] is None
    assert damage[third.path, 3]["seen_bytes"] == third.size_bytes - 1


def test_an_unreadable_manifest_is_damage(
    stored: list[Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`list` cannot show such a checkpoint, so `verify` must."""
    (tmp_path / "storage" / stored[0].name.key).write_text("{}")
    code, found = verified(tmp_path, capsys, "--all")
    assert code == 1
    assert [(each["uuid"], each["is_whole"]) for each in found] == [
        (UUIDS[1], True),
        (UUIDS[0], False),
    ]
    assert "was altered" in found[1]["problem"]


def test_all_of_a_trial(
    stored: list[Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--trial` reads no other trial's checkpoints."""
    flip_a_bit(path_of(tmp_path, stored[0], 1))
    code, found = verified(tmp_path, capsys, "--trial", "gpt-11", "--all")
    assert (code, [each["uuid"] for each in found]) == (0, [UUIDS[1]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either checkpoints, or --trial or --all"),
        (["aaaaaaaa", "--all"], "give either checkpoints, or --trial or --all"),
        (["abc"], "begins with 'abc'"),
        (["--trial", "gpt-8"], "trial 'gpt-8' has no checkpoint"),
    ],
)
def test_refusals(
    stored: list[Manifest],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    """Exit code 2: a command that read nothing must not look like an intact storage."""
    assert run(tmp_path, "verify", *arguments) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def deleted_meanwhile(
    stored: list[Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Manifest:
    """The checkpoint that is deleted as soon as a command reads its files."""
    store = CheckpointStore(str(tmp_path / "storage"))
    find = CheckpointStore.find_damage

    def delete_first(where: CheckpointStore, uuid: str, *files: Any) -> Any:
        if uuid == stored[0].uuid:
            store.delete(stored[0])
        return find(where, uuid, *files)

    monkeypatch.setattr(CheckpointStore, "find_damage", delete_first)
    return stored[0]


def test_a_checkpoint_deleted_meanwhile_is_not_damaged(
    stored: list[Manifest],
    deleted_meanwhile: Manifest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`verify --all` beside a run that prunes gives no false alarm."""
    code, found = verified(tmp_path, capsys, "--all")
    assert (code, [each["uuid"] for each in found]) == (0, [UUIDS[1]])


def test_a_named_checkpoint_deleted_meanwhile(
    deleted_meanwhile: Manifest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2: the checkpoint is neither intact nor damaged."""
    assert run(tmp_path, "verify", *UUIDS) == 2
    printed = capsys.readouterr()
    assert f"{UUIDS[0]} was deleted meanwhile" in printed.err
    assert UUIDS[1][:8] in printed.out


def test_a_repair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A shared file is stored again, and named; exit code 1 while another file stays damaged."""
    store = CheckpointStore(str(tmp_path / "storage"))
    first, _, third = [save(store, tmp_path / "staged", batches) for batches in (7, 11, 13)]
    shared = path_of(tmp_path, first, [file.path for file in first.files].index(SHARED))
    own = path_of(tmp_path, third, [file.path for file in third.files].index("adapter.pt"))
    intact = own.read_bytes()
    flip_a_bit(shared)
    flip_a_bit(own)
    arguments = ("--trial", first.trial, "--all")
    code, found = verified(tmp_path, capsys, *arguments)
    assert (code, [each["is_whole"] for each in found]) == (1, [False, True, False])
    code, found = verified(tmp_path, capsys, *arguments, "--repair")
    assert (code, [each["is_whole"] for each in found]) == (1, [True, True, False])
    assert [each["repaired"] for each in found] == [[SHARED], [], []]
    assert [each["path"] for each in found[2]["damage"]] == ["adapter.pt"]
    own.write_bytes(intact)
    flip_a_bit(shared)
    assert run(tmp_path, "verify", *arguments, "--repair") == 0
    assert f"repaired, in {first.uuid}: {SHARED}" in capsys.readouterr().out
    assert run(tmp_path, "verify", *arguments) == 0
