"""A mistake in the use of the API is caught as in Determined: the same built-in errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trial_core.rank.core_api.test_script_host import Slot
from trial_core.core import PreemptMode, SearcherMode
from trial_core.deepspeed import DeepSpeedTrialContext, overwrite_deepspeed_config
from trial_core.errors import (
    CheckpointError,
    ConfigError,
    InvalidExperimentException,
    TrialflowError,
)
from trial_core.pytorch import Batch, DataLoader, LRScheduler, PyTorchTrialContext, data_length
from trial_core.rank.core_api.context import PreemptContext
from trial_core.rank.core_api.searcher import SearcherOperation, Unit
from trial_core.rank.data import samplers
from trial_core.rank.trial.custom_reducers import ReducerRegistry
from trial_core.rank.trial.metric_reduction import BatchMetrics
from trial_core.schedule.sequencer import searcher_metric
from trial_core.trainer.trainer import fit_begun


def context() -> PyTorchTrialContext:
    return PyTorchTrialContext.from_config({})


def deepspeed_context() -> DeepSpeedTrialContext:
    return DeepSpeedTrialContext(context().run_info, context().distributed)


def scheduler(step_mode: Any) -> LRScheduler:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    return LRScheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1), step_mode)


def wrap_twice(of: PyTorchTrialContext) -> None:
    reducer = of.wrap_reducer(len)
    of.wrap_reducer(reducer)


def reduced(result: Any, name: str | None) -> Any:
    registry = ReducerRegistry()
    registry.wrap(lambda values: result, name)
    return registry.reduce("training", lambda mine: [mine])


def batches(*returned: Any) -> None:
    metrics = BatchMetrics()
    for each in returned:
        metrics.add_call(each)


def fit(max_length: Any) -> Any:
    return fit_begun(None, None, max_length, Batch(1), None, False)


def operation(slot: Slot, *calls: float) -> SearcherOperation:
    asked = SearcherOperation(3, Unit.BATCHES, slot.host)
    for metric in calls:
        asked.report_completed(metric)
    return asked


PLAIN: dict[str, Any] = {"dataset": [1, 2, 3]}

# What the reference raises for each public call that refuses something.
TRIALS: list[tuple[type[BaseException], Callable[[], Any]]] = [
    (ValueError, lambda: context().get_hparam("lr")),
    (ValueError, lambda: context().get_global_batch_size()),
    (ValueError, lambda: context().get_per_slot_batch_size()),
    (ValueError, lambda: deepspeed_context().get_global_batch_size()),
    (ValueError, lambda: deepspeed_context().get_per_slot_batch_size()),
    (AssertionError, lambda: context().set_stop_requested("yes")),  # type: ignore[arg-type]
    (AssertionError, lambda: context().set_enable_tensorboard_logging(1)),  # type: ignore[arg-type]
    (AssertionError, lambda: wrap_twice(context())),
    (AssertionError, lambda: context().wrap_reducer(3)),  # type: ignore[arg-type]
    (AssertionError, lambda: reduced({"a": 1}, "a")),
    (AssertionError, lambda: reduced(1, None)),
    (TypeError, lambda: scheduler("batch")),
    (TypeError, lambda: overwrite_deepspeed_config(3, {})),  # type: ignore[arg-type]
    (ValueError, lambda: data_length({})),
    (ValueError, lambda: data_length([])),
    (ValueError, lambda: data_length(())),
    (TypeError, lambda: data_length(3)),
    (TypeError, lambda: batches(3.0)),
    (ValueError, lambda: batches({"a": 1}, {"b": 1})),
    (RuntimeError, lambda: searcher_metric({"a": 1.0}, "loss")),
    (RuntimeError, lambda: searcher_metric({"loss": [1.0, 2.0]}, "loss")),
    (ValueError, lambda: samplers.DistributedBatchSampler([[1]], num_workers=1, rank=-1)),
    (ValueError, lambda: samplers.DistributedBatchSampler([[1]], num_workers=0, rank=0)),
    (ValueError, lambda: samplers.DistributedBatchSampler([[1]], num_workers=2, rank=2)),
    (TypeError, lambda: fit(100)),
    (TypeError, lambda: fit(Batch([1, 2]))),
    (InvalidExperimentException, lambda: deepspeed_context().train_micro_batch_size_per_gpu),
    (InvalidExperimentException, lambda: deepspeed_context().num_micro_batches_per_slot),
    (InvalidExperimentException, lambda: deepspeed_context().set_mpu(context())),  # type: ignore[arg-type]
]  # fmt: skip

# torch's own error, as there.
TORCHS: list[dict[str, Any]] = [
    {"num_workers": -1},
    {"timeout": -1},
    {"prefetch_factor": 2},
    {"persistent_workers": True},
    {"sampler": [0], "shuffle": True},
    {"batch_sampler": [[0]], "batch_size": 2},
    {"batch_size": None, "drop_last": True},
]

SCRIPTS: list[tuple[type[BaseException], int, Callable[[Slot], Any]]] = [
    (RuntimeError, 1, lambda s: s.context.checkpoint.store_path({}).__enter__()),
    (RuntimeError, 1, lambda s: s.context.checkpoint.upload("a", {})),
    (RuntimeError, 0, lambda s: s.context.checkpoint.upload(None, {"steps_completed": 1})),
    (ValueError, 0, lambda s: s.context.checkpoint.store_path({}).__enter__()),
    (ValueError, 0, lambda s: s.context.checkpoint.upload("a")),
    (ValueError, 0, lambda s: s.context.checkpoint.download("0a", "b", "some")),
    (RuntimeError, 0, lambda s: s.context.train.report_validation_metrics(1, {"loss": object()})),
    (ValueError, 0, lambda s: next(s.context.searcher.operations())),
    (RuntimeError, 1, lambda s: next(s.context.searcher.operations(SearcherMode.ChiefOnly))),
    (RuntimeError, 1, lambda s: operation(s).report_progress(1)),
    (RuntimeError, 0, lambda s: operation(s, 0.5).report_progress(1)),
    (RuntimeError, 1, lambda s: operation(s).report_completed(0.5)),
    (RuntimeError, 0, lambda s: operation(s, 0.5, 0.5)),
    (RuntimeError, 1, lambda s: PreemptContext(s.host, PreemptMode.ChiefOnly).should_preempt()),
]


@pytest.mark.parametrize(("error", "call"), TRIALS)
def test_the_api_of_trials(error: type[BaseException], call: Callable[[], Any]) -> None:
    """Each error is trialflow's, too."""
    with pytest.raises(error) as raised:
        call()
    assert isinstance(raised.value, TrialflowError)


@pytest.mark.parametrize("arguments", TORCHS, ids=str)
def test_the_arguments_of_a_loader(arguments: dict[str, Any]) -> None:
    """A ValueError for each, which is torch's."""
    with pytest.raises(ValueError, match=r"\w"):
        DataLoader(**PLAIN, **arguments)


@pytest.mark.parametrize(("error", "rank", "call"), SCRIPTS)
def test_the_api_of_scripts(
    tmp_path: Path, error: type[BaseException], rank: int, call: Callable[[Slot], Any]
) -> None:
    """On the rank that makes the mistake."""
    with pytest.raises(error):
        call(Slot(tmp_path, rank))


def test_errors_that_a_run_ends_with() -> None:
    """`fit` raises ValueError or TypeError for its arguments; a conflict is a RuntimeError."""
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, TypeError)
    assert issubclass(CheckpointError, RuntimeError)
