"""`trialflow checkpoints` on a real local store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.deployments.cli.stored import UUIDS, run
from tests.support.cli import write_experiment
from tests.support.manifests import FILES, stored_files
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.transfer import files
from trialflow.deployments.cli.main import main
from trialflow.deployments.cli.tables import shortest_unique


def test_list_is_a_table(
    stored: list[Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line for each, oldest first: uuid, trial, batches, when, size and metrics; nothing cut."""
    assert run(tmp_path, "list") == 0
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["uuid", "trial", "batches", "saved", "size", "validation"]
    assert [row.split()[:3] for row in rows] == [
        ["aaaaaaaa", "gpt-7", "7"],
        ["aaaaaaab", "gpt-11", "11"],
    ]
    assert "11.7 KiB" in rows[0]
    assert rows[1].rstrip().endswith("val_loss 0.25 · worst nan")


def test_list_of_a_trial(
    stored: list[Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--trial` leaves out all others."""
    assert run(tmp_path, "list", "--trial", "gpt-11", "--json") == 0
    assert [each["uuid"] for each in json.loads(capsys.readouterr().out)] == [UUIDS[1]]


def test_list_as_json(
    stored: list[Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program gets standard JSON, whatever the metrics are."""
    assert run(tmp_path, "list", "--json") == 0

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    first, second = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert first["batches_trained"] == 7
    assert first["total_bytes"] == stored[0].total_bytes
    assert first["url"] == f"file://{tmp_path}/storage/checkpoints/{UUIDS[0]}"
    assert second["metrics"]["validation"]["val_loss"] == 0.25


def test_an_empty_storage_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing there is no error; the place that was looked at is said."""
    assert run(tmp_path, "list") == 0
    assert capsys.readouterr().out == f"no checkpoints in file://{tmp_path}/storage\n"


def test_a_manifest_that_cannot_be_read_is_warned_of(
    stored: list[Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is no checkpoint, so it is not listed; but it does not vanish silently."""
    (tmp_path / "storage" / stored[0].name.key).write_text("{}")
    assert run(tmp_path, "list") == 0
    printed = capsys.readouterr()
    assert UUIDS[0][:8] not in printed.out
    assert printed.err.startswith("warning: a checkpoint is not listed: ")


def test_show_by_prefix(
    stored: list[Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A unique beginning of the uuid will do; all files are shown with size and rank."""
    assert run(tmp_path, "show", "aaaaaaab") == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"checkpoint       {UUIDS[1]}\n")
    for file in stored[1].files:
        assert f"rank {file.rank}  {file.path}" in shown


def test_show_as_json_is_the_manifest(
    stored: list[Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is printed is the stored object, byte for byte."""
    assert run(tmp_path, "show", UUIDS[0], "--json") == 0
    stored_bytes = (tmp_path / "storage" / stored[0].name.key).read_bytes()
    assert capsys.readouterr().out.encode() == stored_bytes


def test_an_ambiguous_prefix(
    stored: list[Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is refused, and the candidates are named."""
    assert run(tmp_path, "show", "aaaa") == 2
    message = capsys.readouterr().err
    assert all(uuid in message for uuid in UUIDS)


def test_download(
    stored: list[Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All files and the manifest are brought, and where they are is said."""
    target = tmp_path / "here"
    assert run(tmp_path, "download", "aaaaaaaa", "--to", str(target)) == 0
    downloaded = stored_files(target)
    assert downloaded.pop("manifest.json") == stored[0].to_json()
    assert downloaded == FILES
    assert f"3 files, 11.7 KiB, in {target}" in capsys.readouterr().out


def test_download_as_json(
    stored: list[Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program is told which checkpoint it has got, and where."""
    assert run(tmp_path, "download", "aaaaaaaa", "--to", str(tmp_path / "here"), "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["uuid"], said["folder"]) == (UUIDS[0], str(tmp_path / "here"))
    assert said["total_bytes"] == stored[0].total_bytes


def test_download_of_one_that_is_pruned_meanwhile(
    stored: list[Manifest],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is not called damaged."""
    store = CheckpointStore(str(tmp_path / "storage"))
    fetch = files.fetch_files

    def delete_first(*arguments: Any) -> int:
        store.delete(stored[0])
        return fetch(*arguments)

    monkeypatch.setattr(files, "fetch_files", delete_first)
    assert run(tmp_path, "download", "aaaaaaaa", "--to", str(tmp_path / "here")) == 2
    message = capsys.readouterr().err
    assert f"{UUIDS[0]} has been deleted meanwhile" in message
    assert "damaged" not in message


def test_download_of_a_damaged_checkpoint(
    stored: list[Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It fails with exit code 1, and names the file."""
    victim = stored[0].files[0].path
    (tmp_path / "storage" / "checkpoints" / UUIDS[0] / victim).write_bytes(b"x")
    assert run(tmp_path, "download", "aaaaaaaa", "--to", str(tmp_path / "here")) == 1
    assert victim in capsys.readouterr().err


def test_storage_of_an_experiment(
    stored: list[Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--config` looks where that experiment saves."""
    path = write_experiment(tmp_path, checkpoint_storage=str(tmp_path / "storage"))
    assert main(["checkpoints", "list", "--config", str(path)]) == 0
    assert "gpt-11" in capsys.readouterr().out


def test_storage_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without an option it is the folder where runs keep theirs."""
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))
    assert main(["checkpoints", "list"]) == 0
    assert capsys.readouterr().out == f"no checkpoints in file://{tmp_path}/home/checkpoints\n"


def test_uuids_are_as_short_as_they_can_be() -> None:
    """Eight characters, or more where they would not tell checkpoints apart."""
    assert shortest_unique(UUIDS) == 8
    assert shortest_unique(["0123456789", "0123456780"]) == 10
    assert shortest_unique(["0123456789", "0123456789"]) == 8
