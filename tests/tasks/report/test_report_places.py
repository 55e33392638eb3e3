"""What else belongs to a run, and where the report says it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.waiting import until
from trial_core.checkpoint.store import CheckpointStore
from trialflow.tasks.report import Report

pytestmark = pytest.mark.usefixtures("no_artifact")


def test_where_tensorboards_files_are_is_said_before_the_end(
    new_report: Callable[[], Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the checkpoint on with which they were stored: a run that fails says it too."""
    monkeypatch.setattr("trialflow.tasks.report.live_report.UPDATE_SECONDS", 0.01)
    store = CheckpointStore(f"file://{tmp_path}/checkpoints")
    with new_report() as report:
        (tmp_path / "run" / "tensorboard").mkdir()
        store.storage.write("runs/toy-0000beef/tensorboard/rank-0/events", b"event")
        report.checkpoint_committed("uuid-20", 20, 1024)
        said = f"TensorBoard: `{store.url}/runs/toy-0000beef/tensorboard`"
        until(lambda: report.path.exists() and said in report.path.read_text(), said, 20)
