"""`trialflow runs clean`: what it removes, and what stays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trial_core.checkpoint import layout
from trial_core.checkpoint.store import CheckpointStore
from trial_core.processes.machine.run_dirs import LOCK, locked_run_dir
from trialflow.deployments.cli.console import REFUSED
from trialflow.deployments.cli.main import main

REPORT = "# report\n"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointStore:
    """The default storage, which is in the folder of the runs."""
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path))
    return CheckpointStore(str(tmp_path / "checkpoints"))


def finished(
    store: CheckpointStore, trial: str, *, is_old: bool = True, stored: str = "all"
) -> Path:
    """The folder of a run that is over, with its files in the storage."""
    with locked_run_dir(trial) as folder:
        for name, text in (
            ("report.md", REPORT), ("logs/rank-0.log", "a log"), ("logs/rank-1.log", ""),
            ("tensorboard/rank-0/events", "events"), ("code/trial.py", "of the checkpoint"),
            ("staging/never-uploaded", "x" * 2**20), ("logs-place", "logs/2031-here"),
        ):  # fmt: skip
            (folder / name).parent.mkdir(exist_ok=True, parents=True)
            (folder / name).write_text(text)
    for name, text in (
        ("report.md", REPORT), ("tensorboard/rank-0/events", "events"),
        ("logs/2031-here/rank-0.log", "a log" if stored == "all" else "a l"),
    ):  # fmt: skip
        store.storage.write(layout.run_file_key(trial, name), text.encode())
    if is_old:
        for path in folder.rglob("*"):
            os.utime(path, (0, 0))
        (folder / LOCK).touch()  # as filelock 4.1, when it is looked at
    return folder


def clean(store: CheckpointStore, *arguments: str) -> int:
    return main(["runs", "clean", "--storage", store.url, *arguments])


def test_only_what_is_old_over_and_stored(
    store: CheckpointStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """A live run, a young one, and one with a file that is not wholly stored keep all files."""
    removed = finished(store, "old-1")
    kept = [finished(store, "old-2", stored="a part"), finished(store, "young-1", is_old=False)]
    finished(store, "live-1")
    store.storage.write("manifests/x", b"of the storage, which is in the same folder")
    with locked_run_dir("live-1") as live:
        assert clean(store, "--yes") == 0
        assert (live / "report.md").exists()
    shown = capsys.readouterr().out
    assert not removed.exists()
    assert [(each / "logs" / "rank-0.log").read_text() for each in kept] == ["a log", "a log"]
    assert store.storage.read("manifests/x") is not None
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert any(line.startswith("keep live-1") and "used by process" in line for line in lines)
    assert any(
        line.startswith("keep old-2") and "logs/rank-0.log is not in" in line for line in lines
    )
    assert any(line.startswith("keep young-1") for line in lines)
    assert f"to remove: 1 folder of 4 in {removed.parent}, 1.0 MiB" in lines
    assert lines[-1] == f"removed {removed}, 1.0 MiB"
    assert clean(store, "--older-than", "0", "--yes") == 0
    assert not (kept[1]).exists()


def test_it_asks(store: CheckpointStore, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal and without --yes it removes nothing."""
    folder = finished(store, "old-1")
    assert clean(store) == REFUSED
    assert "give --yes to remove 1 folder" in capsys.readouterr().err
    assert folder.exists()
