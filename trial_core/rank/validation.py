"""The validation loop: one validation, with the hooks in it that `PyTorchCallback` lists.

`on_validation_end`, which may change the metrics, is the next stage. The loop and that hook run
with the models in evaluation mode, without gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from trial_core.errors import TrialError
from trial_core.processes.slots.stop_barrier import StopBarrier
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.data.loaders import Loaders
from trial_core.rank.data.validation_set import ValidationSet
from trial_core.rank.rank_state import capture_rng, restore_rng
from trial_core.rank.state_files.late_copies import finish_copies
from trial_core.rank.training import BatchReporter, with_custom
from trial_core.rank.trial.callback import overridden_hooks, trial_callbacks
from trial_core.rank.trial.metric_reduction import BatchMetrics, Reducer, combine
from trial_core.rank.trial.optimizer_modes import optimizers_evaluating
from trial_core.rank.trial.trial_adapter import TrialAdapter

# With these hooks, evaluating one batch does not tell the metrics' names.
VALIDATION_HOOKS = {
    "on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end"
}  # fmt: skip


class _Interrupted(Exception):
    """The validation ends early, on every rank."""


@contextmanager
def evaluating(adapter: TrialAdapter) -> Iterator[None]:
    """Inside the block, models and optimizers are in evaluation mode, without gradients."""
    finish_copies()  # averages and optimizers with modes exchange weights
    adapter.set_training(False)
    with ExitStack() as stack:
        stack.enter_context(optimizers_evaluating(adapter.optimizers, adapter.weight_copies))
        for callback in trial_callbacks(adapter.callbacks):
            stack.enter_context(callback.evaluating())
        stack.callback(adapter.set_training, True)
        stack.enter_context(torch.no_grad())
        yield


def validate(
    adapter: TrialAdapter,
    loaders: Loaders,
    distributed: DistributedContext,
    progress: BatchReporter,
    stop_barrier: StopBarrier,
) -> dict[str, Any] | None:
    """Validate on the whole set; metrics reduced over all ranks. Collective: every rank calls this.

    If a forward pass needs other ranks (ZeRO-3, custom model parallelism), a rank with a shorter
    shard continues with batches that count neither in metrics nor in custom reducers. With
    pipelines, all ranks end with the shortest shard, because DeepSpeed averages a loss over all
    ranks. Validation loaders need no length. The `stop_barrier` may end the validation early on
    every rank; the result is then None. Raises TrialError if the set is empty or too small for a
    pipeline, or the trial took more micro-batches than the loader gives.
    """
    with evaluating(adapter):
        adapter.reducers.reset("validation")
        for callback in adapter.callbacks.values():
            callback.on_validation_start()
        for callback in adapter.callbacks.values():
            callback.on_validation_epoch_start()
        stop_barrier.begin_workload()
        contribution = None
        reducers: Any = adapter.evaluation_reducer()
        try:
            if adapter.evaluates_full_dataset:
                metrics = BatchMetrics("evaluate_full_dataset")
                if distributed.get_rank() == 0:
                    whole = loaders.validation.unsharded()
                    metrics.add_call(adapter.evaluate_full_dataset(whole))
                reducers = Reducer.AVG  # of a single value: the trial has reduced the metrics
            else:
                metrics, contribution = _evaluate_batches(
                    adapter, loaders.validation, distributed, progress, stop_barrier
                )
        except _Interrupted:
            return None
        if not stop_barrier.may_finish_workload():
            return None
        outputs = metrics.per_call()
        for callback in adapter.callbacks.values():
            callback.on_validation_epoch_end(outputs)
        return reduce_validation(metrics, adapter, distributed, reducers, contribution)


def metric_names(
    adapter: TrialAdapter, loaders: Loaders, distributed: DistributedContext
) -> list[str] | None:
    """The names of the validation metrics, found by evaluating one batch. Collective.

    Calls `evaluate_batch` once on every rank that validates, and no callback. Training does not
    notice: random state is restored, and a validation always begins with the first batch.

    None if one batch does not tell the names: the trial evaluates the whole set at once, a reducer
    was wrapped without a name, the validation loader can be read only once or has no batch, or
    callbacks have one of `VALIDATION_HOOKS`, on which `evaluate_batch` may depend. The hook
    `on_validation_end` may add metrics to these names.
    """
    of_reducers = adapter.reducers.names("validation")
    is_unclear = (
        of_reducers is None
        or adapter.evaluates_full_dataset
        or isinstance(loaders.validation.loader, Iterator)
        or not VALIDATION_HOOKS.isdisjoint(overridden_hooks(adapter.callbacks))
    )
    if any(distributed.allgather(is_unclear)):  # all ranks decide alike
        return None
    one_batch = replace(loaders.validation, limit=1)
    silent, rng = BatchReporter(lambda _: None), capture_rng()
    adapter.reducers.reset("validation")
    with evaluating(adapter):
        metrics, _ = _evaluate_batches(adapter, one_batch, distributed, silent, StopBarrier())
    adapter.reducers.reset("validation")
    restore_rng(rng)
    partials = distributed.allgather(metrics.partials() if adapter.reports_metrics else {})
    evaluated = [part["metrics"] for part in partials if part.get("calls")]
    return sorted({*(of_reducers or ()), *evaluated[0]}) if evaluated else None


def _evaluate_batches(
    adapter: TrialAdapter,
    validation: ValidationSet,
    distributed: DistributedContext,
    progress: BatchReporter,
    stop_barrier: StopBarrier,
) -> tuple[BatchMetrics, list[Any] | None]:
    """The metrics, and the custom reducers' values before the first batch that does not count."""
    metrics = BatchMetrics("evaluate_batch")
    contribution = None
    batches = validation.begin()
    for batch_idx, counts in enumerate(validation.evaluations(batches, distributed)):
        if not stop_barrier.may_begin_step():
            raise _Interrupted
        if not counts and contribution is None:
            contribution = adapter.reducers.contribution("validation")
            if batches is not None:
                batches.repeat_forever(validation.padding_micro_batch())
        try:
            outcome = adapter.evaluate_batch(batches, batch_idx)
        except StopIteration as end:
            raise TrialError(
                "evaluate_batch asked for more micro-batches than the validation loader gave this "
                f"rank, in call {batch_idx} of the validation; take one in each call (with a "
                "pipeline, engine.eval_batch takes its own), and make the loader's len() match "
                "what it gives"
            ) from end
        if counts and adapter.reports_metrics:
            metrics.add_call(outcome)
        progress.report(batch_idx + 1)
    return metrics, contribution


def reduce_validation(
    metrics: BatchMetrics,
    adapter: TrialAdapter,
    distributed: DistributedContext,
    reducers: Reducer | Mapping[str, Reducer] = Reducer.AVG,
    contribution: list[Any] | None = None,
) -> dict[str, Any]:
    """Reduce the metrics of a validation, to the same on every rank. Collective.

    Only ranks that report metrics count. `contribution` is this rank's values for the custom
    reducers; None for their present values. Raises TrialError if no batch was validated, ranks
    report different metrics, or a custom reducer has the name of another metric.
    """
    partials = distributed.allgather(metrics.partials() if adapter.reports_metrics else {})
    if not any(part.get("calls") for part in partials):
        raise TrialError(
            "there are no validation metrics: the validation loader gave not a single batch to any "
            "rank that reports metrics"
        )
    return with_custom(
        "validation", combine(partials, reducers), adapter, distributed, contribution
    )
