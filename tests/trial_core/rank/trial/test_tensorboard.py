"""A rank's TensorBoard folder: it may move, because the run resumes another trial."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path

import pytest

from trial_core.errors import TrialflowError
from trial_core.rank.trial.tensorboard import TensorBoard


def test_written_files_are_moved(tmp_path: Path) -> None:
    """Also from subfolders; the old path leads to the new folder."""
    tensorboard = TensorBoard(tmp_path / "new")
    known = tensorboard.folder()
    (known / "deeper").mkdir()
    (known / "deeper" / "events").write_text("new")
    (tmp_path / "old" / "deeper").mkdir(parents=True)
    (tmp_path / "old" / "deeper" / "earlier").write_text("old")
    tensorboard.move_to(tmp_path / "old")
    assert tensorboard.folder() == tmp_path / "old"
    (known / "note").write_text("later")
    seen = {
        path.relative_to(tmp_path / "old").as_posix(): path.read_text()
        for path in (tmp_path / "old").rglob("*")
        if path.is_file()
    }
    assert seen == {"deeper/events": "new", "deeper/earlier": "old", "note": "later"}


def test_an_open_writer_continues_in_the_new_folder(tmp_path: Path) -> None:
    """Also the writers that `add_scalars` has created."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tensorboard = TensorBoard(tmp_path / "new")
    for step in range(4):
        tensorboard.writer().add_scalars("losses", {"mine": float(step)}, step)
        if step == 1:
            tensorboard.move_to(tmp_path / "old")
    tensorboard.finish()
    events = EventAccumulator(str(tmp_path / "old" / "losses_mine")).Reload().Scalars("losses")
    assert [event.value for event in events] == [0, 1, 2, 3]


def test_a_tensorboard_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Metrics that the trial did not ask to write end no run: one warning says why."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    tensorboard = TensorBoard(tmp_path / "new")
    tensorboard.log_metrics_by_default()
    with caplog.at_level(logging.WARNING):
        for batches in (2, 4):
            tensorboard.report("training", batches, {"loss": 0.5})
    (warning,) = caplog.messages
    assert warning.startswith("reported metrics are not written for TensorBoard, because ")
    assert "torch.utils.tensorboard" in warning


def test_without_files_no_folder_is_created(tmp_path: Path) -> None:
    """The new folder is created on first use."""
    tensorboard = TensorBoard(tmp_path / "new")
    tensorboard.move_to(tmp_path / "old")
    assert list(tmp_path.iterdir()) == []
    assert tensorboard.folder() == tmp_path / "old"


def test_a_failed_move_is_an_error(tmp_path: Path) -> None:
    """The message has both folders and the reason."""
    tensorboard = TensorBoard(tmp_path / "new")
    (tensorboard.folder() / "events").write_text("new")
    (tmp_path / "old").write_text("in the way")
    with pytest.raises(TrialflowError, match=r"TensorBoard files from .*new to .*old, .*exists"):
        tensorboard.move_to(tmp_path / "old")


def test_short_workloads_do_not_wait_for_the_event_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their metrics are in the file some time later; those of a validation at once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr("trial_core.rank.trial.tensorboard.FLUSH_SECONDS", 1e6)
    tensorboard = TensorBoard(tmp_path)
    tensorboard.set_automatic(True)
    flushes: list[int] = []
    flush = tensorboard.writer().flush
    monkeypatch.setattr(tensorboard.writer(), "flush", lambda: (flushes.append(1), flush()))
    for batches in (1, 2, 3):
        tensorboard.report("training", batches, {"loss": 0.5})
    assert len(flushes) == 1
    tensorboard.report("validation", 3, {"loss": 0.25})
    events = EventAccumulator(str(tmp_path)).Reload()
    assert len(events.Scalars("Determined/loss")) == 3
    assert [each.value for each in events.Scalars("Determined/val_loss")] == [0.25]


def test_a_disk_that_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be written ends no run: one warning says so. The trial may use the writer."""
    # TensorBoard's thread ends with the error, which the next call raises.
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr("trial_core.rank.trial.tensorboard.FLUSH_SECONDS", 1e6)
    threads = {*threading.enumerate()}
    tensorboard = TensorBoard(tmp_path)
    tensorboard.set_automatic(True)
    tensorboard.report("training", 1, {"loss": 0.5})
    (events,) = tmp_path.glob("events.*")  # TensorBoard opens it for each write
    events.unlink()
    events.symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING):
        tensorboard.report("training", 2, {"loss": 0.5})
        for thread in {*threading.enumerate()} - threads:
            thread.join(60)
        tensorboard.report("training", 4, {"loss": 0.5})
        tensorboard.writer().add_scalar("mine", 0.5, 4)
        tensorboard.writer().flush()
        tensorboard.report("validation", 6, {"loss": 0.5})
        tensorboard.finish()
    (warning,) = caplog.messages
    assert warning.startswith("files for TensorBoard cannot be written: [Errno 28] No space left")
