"""What a workload tells the driver while it trains."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

from trial_core.rank import training
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.training import BatchReporter, TrainingLoop
from trial_core.rank.trial.context import RunInfo


def test_the_last_batch_is_told_by_the_answer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a workload of one batch wakes the driver once."""
    monkeypatch.setattr(training, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(training, "reduce_training", lambda *_: ({}, []))
    told: list[int] = []
    adapter: Any = MagicMock(callbacks={}, reports_training_metrics=False)
    loop = TrainingLoop(
        adapter, RunInfo("toy-0000beef", {}), None, DistributedContext.from_environment({}),
        False, MagicMock(), BatchReporter(told.append), MagicMock(), MagicMock(),
    )  # fmt: skip
    loop.train(3)
    loop.train(4)
    assert told == [1, 2]
    assert adapter.train_batch.call_count == 4
