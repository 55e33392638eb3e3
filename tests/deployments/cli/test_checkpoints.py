"""`trialflow checkpoints list`, `show` and `download` on a local storage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.deployments.cli.stored import UUIDS, run
from tests.support.cli import write_experiment
from tests.support.manifests import FILES, new_manifest, stored_files
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer import fetch
from trial_core.schedule.sequencer import Progress
from trialflow.deployments.cli.main import main
from trialflow.deployments.cli.tables import shortest_unique


def test_list(stored: list[Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each checkpoint, oldest first; no cell is cut."""
    assert run(tmp_path, "list") == 0
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["uuid", "trial", "batches", "saved", "size", "validation"]
    assert [row.split()[:3] for row in rows] == [
        ["aaaaaaaa", "gpt-7", "7"],
        ["aaaaaaab", "gpt-11", "11"],
    ]
    assert "11.7 KiB" in rows[0]
    assert rows[1].rstrip().endswith("val_loss 0.25 · worst nan")


def test_list_as_json(
    stored: list[Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output is standard JSON, also for NaN metrics; `--trial` selects a trial."""
    assert run(tmp_path, "list", "--json") == 0

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    shown = json.loads(capsys.readouterr().out, parse_constant=refuse)
    first, second = shown["checkpoints"]
    assert first["batches_trained"] == 7
    assert first["total_bytes"] == first["own_bytes"] == stored[0].total_bytes
    assert first["url"] == f"file://{tmp_path}/storage/checkpoints/{UUIDS[0]}"
    assert second["metrics"]["validation"]["val_loss"] == 0.25
    assert run(tmp_path, "list", "--trial", "gpt-11", "--json") == 0
    assert json.loads(capsys.readouterr().out)["checkpoints"] == [second]


def test_the_best_of_each_trial_is_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the trial's searcher metric, in the table and in JSON."""
    store = CheckpointStore(str(tmp_path / "storage"))
    for trial, config in (
        ("a-1", {"searcher": {"metric": "loss", "smaller_is_better": True}}),
        ("b-1", {"searcher": {"metric": "accuracy", "smaller_is_better": False}}),
    ):
        for batches, value in ((7, 0.5), (11, 0.25), (13, 0.375)):
            store.commit(
                new_manifest(
                    batches, trial=trial, progress=Progress(batches, validated_at=batches),
                    metrics={"validation": {"loss": value, "accuracy": value}}, config=config,
                )
            )  # fmt: skip
    assert run(tmp_path, "list") == 0
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[-2:] == ["best", "validation"]
    marked = [row.split()[1:3] for row in rows if " best " in row]
    assert sorted(marked) == [["a-1", "11"], ["b-1", "7"]]
    assert run(tmp_path, "list", "--json") == 0
    shown = json.loads(capsys.readouterr().out)["checkpoints"]
    best = [(each["trial"], each["batches_trained"]) for each in shown if each["is_best"]]
    assert sorted(best) == [("a-1", 11), ("b-1", 7)]


@pytest.fixture
def stopped(tmp_path: Path) -> Manifest:
    """A checkpoint at batch 60 of a run that validated last at batch 40."""
    manifest = new_manifest(
        60, progress=Progress(60, validated_at=40),
        metrics={"training": {"loss": 0.75}, "validation": {"loss": 0.125}},
    )  # fmt: skip
    CheckpointStore(str(tmp_path / "storage")).commit(manifest)
    return manifest


def test_no_checkpoint_shows_the_validation_of_another_batch(
    stopped: Manifest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`list` and `show` say that it was not validated, and name the last validation's batch."""
    assert run(tmp_path, "list") == 0
    listed = capsys.readouterr().out
    assert listed.rstrip().endswith("  not validated (last at batch 40)")
    assert "0.125" not in listed
    assert run(tmp_path, "show", stopped.uuid) == 0
    facts = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines()[:-1])
    assert facts["validation"].strip() == "not validated (last at batch 40)"
    assert facts["last validation"].strip() == "loss 0.125 (at batch 40)"


def test_the_best_checkpoint_of_the_json(
    stopped: Manifest, history: list[Manifest], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Only validated checkpoints have the metric, so the best one is found by it alone."""
    assert run(tmp_path, "list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)["checkpoints"]
    (last,) = [each for each in listed if each["uuid"] == stopped.uuid]
    assert (last["batches_trained"], last["validated_at"]) == (60, 40)
    assert (last["metrics"], last["earlier_validation"]) == (
        {"training": {"loss": 0.75}}, {"loss": 0.125},
    )  # fmt: skip
    validated = [each for each in listed if "validation" in each["metrics"]]
    best = min(validated, key=lambda each: each["metrics"]["validation"]["loss"])
    assert best["uuid"] == history[1].uuid
    assert run(tmp_path, "show", stopped.uuid, "--json") == 0
    shown = json.loads(capsys.readouterr().out)["manifest"]
    assert shown["metrics"] == {"training": {"loss": 0.75}}


def test_list_of_an_empty_storage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty storage is no error; its URL is printed."""
    assert run(tmp_path, "list") == 0
    assert capsys.readouterr().out == f"no checkpoints in file://{tmp_path}/storage\n"


def test_list_warns_about_an_unreadable_manifest(
    stored: list[Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unreadable manifest is not listed, and is warned about."""
    (tmp_path / "storage" / stored[0].name.key).write_text("{}")
    assert run(tmp_path, "list") == 0
    printed = capsys.readouterr()
    assert UUIDS[0][:8] not in printed.out
    assert printed.err.startswith("warning: a checkpoint is not listed: ")


def test_show_by_prefix(
    stored: list[Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first characters of the uuid are enough; every file is shown with its rank."""
    assert run(tmp_path, "show", "aaaaaaab") == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"checkpoint       {UUIDS[1]}\n")
    for file in stored[1].files:
        assert f"rank {file.rank}  {file.path}" in shown


def test_show_as_json_is_the_manifest(
    stored: list[Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`show --json` has the stored manifest."""
    assert run(tmp_path, "show", UUIDS[0], "--json") == 0
    stored_bytes = (tmp_path / "storage" / stored[0].name.key).read_bytes()
    assert json.loads(capsys.readouterr().out)["manifest"] == json.loads(stored_bytes)


def test_an_ambiguous_prefix(
    stored: list[Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An ambiguous prefix is refused; the candidates are named."""
    assert run(tmp_path, "show", "aaaa") == 2
    message = capsys.readouterr().err
    assert all(uuid in message for uuid in UUIDS)


def test_download(
    stored: list[Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Downloads all files and the manifest, and prints the folder, which may be reused."""
    target = tmp_path / "here"
    assert run(tmp_path, "download", "aaaaaaaa", "--to", str(target)) == 0
    downloaded = stored_files(target)
    assert downloaded.pop("manifest.json") == stored[0].to_json()
    assert downloaded == FILES
    assert f"3 files, 11.7 KiB, in {target}" in capsys.readouterr().out
    assert run(tmp_path, "download", "aaaaaaaa", "--to", str(target), "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["uuid"], printed["folder"]) == (UUIDS[0], str(target))


def test_download_of_a_checkpoint_deleted_meanwhile(
    stored: list[Manifest],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A checkpoint that is deleted during its download is not called damaged."""
    store = CheckpointStore(str(tmp_path / "storage"))
    fetch_files = fetch.fetch_files

    def delete_first(*arguments: Any, **named: Any) -> int:
        store.delete(stored[0])
        return fetch_files(*arguments, **named)

    monkeypatch.setattr(fetch, "fetch_files", delete_first)
    assert run(tmp_path, "download", "aaaaaaaa", "--to", str(tmp_path / "here")) == 2
    message = capsys.readouterr().err
    assert f"{UUIDS[0]} has been deleted meanwhile" in message
    assert "damaged" not in message


def test_download_of_a_damaged_checkpoint(
    stored: list[Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A damaged file is named; the exit code is 1."""
    victim = stored[0].files[0].path
    (tmp_path / "storage" / "checkpoints" / UUIDS[0] / victim).write_bytes(b"x")
    assert run(tmp_path, "download", "aaaaaaaa", "--to", str(tmp_path / "here")) == 1
    assert victim in capsys.readouterr().err


def test_storage_of_an_experiment(
    stored: list[Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--config` uses the storage of that experiment."""
    path = write_experiment(tmp_path, checkpoint_storage=str(tmp_path / "storage"))
    assert main(["checkpoints", "list", "--config", str(path)]) == 0
    assert "gpt-11" in capsys.readouterr().out


def test_default_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without an option, the storage is the folder of runs."""
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))
    assert main(["checkpoints", "list"]) == 0
    assert capsys.readouterr().out == f"no checkpoints in file://{tmp_path}/home/checkpoints\n"


def test_shortest_unique() -> None:
    """Eight characters, or as many as make the uuids distinct."""
    assert shortest_unique(UUIDS) == 8
    assert shortest_unique(["0123456789", "0123456780"]) == 10
    assert shortest_unique(["0123456789", "0123456789"]) == 8
