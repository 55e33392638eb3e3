"""What a workload tells the driver while it trains."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from trial_core.deepspeed.deepspeed_adapter import DeepSpeedTrialAdapter
from trial_core.pytorch.pytorch_adapter import PyTorchTrialAdapter
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


@pytest.mark.parametrize("collects", [True, False])
def test_the_graph_of_a_batch_is_freed_before_the_next_one(
    monkeypatch: pytest.MonkeyPatch, collects: bool
) -> None:
    """What a trial returns may hold it, with activations that no backward pass has freed."""
    monkeypatch.setattr(training, "reduce_training", lambda *_: ({}, []))
    returned: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def train_batch(*_: Any) -> dict[str, torch.Tensor]:
        alive.append(sum(each() is not None for each in returned))
        loss = torch.ones(2, requires_grad=True).sum()
        returned.append(weakref.ref(loss))
        return {"loss": loss}

    context: Any = MagicMock(training_batch=nullcontext)
    trial = SimpleNamespace(_context=context, _next=lambda _: None, _share_buffers=lambda: None,
                            _train_batch=train_batch)  # fmt: skip
    engine: Any = MagicMock(micro_steps=0)
    engines = SimpleNamespace(
        _context=SimpleNamespace(models=[engine], use_pipeline_parallel=True),
        _trial=SimpleNamespace(train_batch=train_batch), _calls_per_batch=2,
    )  # fmt: skip
    for kind, adapter in ((PyTorchTrialAdapter, trial), (DeepSpeedTrialAdapter, engines)):
        alive.clear()
        loop = TrainingLoop(
            MagicMock(
                callbacks={}, reports_training_metrics=collects,
                train_batch=partial(kind.train_batch, adapter),
            ),
            RunInfo("toy-0000beef", {}), None, DistributedContext.from_environment({}),
            False, MagicMock(), MagicMock(), MagicMock(), MagicMock(),
        )  # fmt: skip
        loop.train(3)
        assert len(alive) >= 3
        assert not any(alive)
