"""Uploading a rank's files for TensorBoard, without ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from trial_core.checkpoint.store import CheckpointStore
from trial_core.rank.run_file_upload import RunFileUpload, tensorboard_in
from trial_core.rank.trial.context import RunInfo


@pytest.fixture
def info(tmp_path: Path) -> RunInfo:
    info = RunInfo("toy-1", {}, tensorboard=tensorboard_in(tmp_path / "run", 0))
    (info.tensorboard.folder() / "events").write_text("one")
    return info


def new_upload(info: RunInfo, tmp_path: Path) -> RunFileUpload:
    store = CheckpointStore(str(tmp_path / "storage"))
    return RunFileUpload(info, store, tmp_path / "run")


def test_a_storage_failure_does_not_end_training(info: RunInfo, tmp_path: Path) -> None:
    """It is reported, and the next upload includes the same files."""
    files = new_upload(info, tmp_path)
    (tmp_path / "storage").write_text("in the way")
    stored = files.upload()
    assert stored.files == 0
    assert stored.problem is not None
    assert "storage" in stored.problem
    (tmp_path / "storage").unlink()
    assert (files.upload().files, files.upload().files) == (1, 0)
    assert (tmp_path / "storage/runs/toy-1/tensorboard/rank-0/events").read_text() == "one"


def test_the_writers_buffer_is_uploaded(info: RunInfo, tmp_path: Path) -> None:
    """TensorBoard's writer would keep an event in memory for two minutes."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    info.tensorboard.writer().add_scalar("mine", 4.5, 1)
    new_upload(info, tmp_path).upload()
    seen = EventAccumulator(str(tmp_path / "storage/runs/toy-1/tensorboard/rank-0")).Reload()
    assert [event.value for event in seen.Scalars("mine")] == [4.5]


def test_a_rank_does_not_upload_to_a_process_local_storage(info: RunInfo, tmp_path: Path) -> None:
    """Only the driver sees memory://, so the driver uploads there."""
    store = CheckpointStore("memory://measured-here")
    assert RunFileUpload(info, store, tmp_path / "run").upload().files == 0
    assert store.storage.sizes("runs") == {}
