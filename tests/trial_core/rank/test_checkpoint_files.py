"""Uploading a rank's files for TensorBoard, without ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from trial_core.checkpoint.store import CheckpointStore
from trial_core.rank.checkpoint_files import CheckpointFiles, tensorboard_in
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.trial.context import RunInfo


@pytest.fixture
def info(tmp_path: Path) -> RunInfo:
    info = RunInfo("toy-1", {}, tensorboard=tensorboard_in(tmp_path / "run", 0))
    (info.tensorboard.folder() / "events").write_text("one")
    return info


def files_in(info: RunInfo, tmp_path: Path, url: str = "storage") -> CheckpointFiles:
    store = CheckpointStore(url if "://" in url else str(tmp_path / url))
    alone = DistributedContext.from_environment({})
    return CheckpointFiles(tmp_path / "run", store, alone, info)


def test_a_storage_failure_does_not_end_training(info: RunInfo, tmp_path: Path) -> None:
    """It is reported, and the next upload includes the same files."""
    files = files_in(info, tmp_path)
    (tmp_path / "storage").write_text("in the way")
    stored = files.upload_run_files()
    assert stored.files == 0
    assert stored.problem is not None
    assert "storage" in stored.problem
    (tmp_path / "storage").unlink()
    assert (files.upload_run_files().files, files.upload_run_files().files) == (1, 0)
    assert (tmp_path / "storage/runs/toy-1/tensorboard/rank-0/events").read_text() == "one"


def test_the_writers_buffer_is_uploaded(info: RunInfo, tmp_path: Path) -> None:
    """TensorBoard's writer would keep an event in memory for two minutes."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    info.tensorboard.writer().add_scalar("mine", 4.5, 1)
    files_in(info, tmp_path).upload_run_files()
    seen = EventAccumulator(str(tmp_path / "storage/runs/toy-1/tensorboard/rank-0")).Reload()
    assert [event.value for event in seen.Scalars("mine")] == [4.5]


def test_a_rank_does_not_upload_to_a_process_local_storage(info: RunInfo, tmp_path: Path) -> None:
    """Only the driver sees memory://, so the driver uploads there."""
    files = files_in(info, tmp_path, "memory://measured-here")
    assert files.upload_run_files().files == 0
    assert files.store.storage.sizes("runs") == {}
