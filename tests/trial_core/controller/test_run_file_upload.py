"""A rank's files for TensorBoard on their way to the storage; no ranks needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from trial_core.checkpoint.store import CheckpointStore
from trial_core.context import RunInfo
from trial_core.controller.run_file_upload import RunFileUpload, instruments_in


@pytest.fixture
def info(tmp_path: Path) -> RunInfo:
    info = RunInfo("toy-1", {}, instruments=instruments_in(tmp_path / "run", 0))
    (info.instruments.folder() / "events").write_text("one")
    return info


def measured(info: RunInfo, tmp_path: Path) -> RunFileUpload:
    store = CheckpointStore(str(tmp_path / "storage"))
    return RunFileUpload(info, store, tmp_path / "run")


def test_a_storage_that_fails_does_not_end_training(info: RunInfo, tmp_path: Path) -> None:
    """The problem is told, and what is left goes with the next upload."""
    files = measured(info, tmp_path)
    (tmp_path / "storage").write_text("in the way")
    stored = files.upload()
    assert stored.files == 0
    assert stored.problem is not None
    assert "storage" in stored.problem
    (tmp_path / "storage").unlink()
    assert (files.upload().files, files.upload().files) == (1, 0)
    assert (tmp_path / "storage/runs/toy-1/tensorboard/rank-0/events").read_text() == "one"


def test_what_the_writer_has_in_hand_is_uploaded(info: RunInfo, tmp_path: Path) -> None:
    """An event is in the storage although the writer would have kept it for two minutes."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    info.instruments.writer().add_scalar("mine", 4.5, 1)
    measured(info, tmp_path).upload()
    seen = EventAccumulator(str(tmp_path / "storage/runs/toy-1/tensorboard/rank-0")).Reload()
    assert [event.value for event in seen.Scalars("mine")] == [4.5]


def test_a_process_local_storage_is_left_to_the_driver(info: RunInfo, tmp_path: Path) -> None:
    """What a rank put into its own memory nobody would ever see."""
    store = CheckpointStore("memory://measured-here")
    assert RunFileUpload(info, store, tmp_path / "run").upload().files == 0
    assert store.storage.sizes("runs") == {}
