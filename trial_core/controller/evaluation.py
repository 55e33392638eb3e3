"""The validation loop.

One validation, with every hook that runs inside it::

    on_validation_start()
    on_validation_epoch_start()
    for each batch of this rank's shard, while nobody asks the run to stop:
        trial.evaluate_batch(...)               or trial.evaluate_full_dataset once, on rank 0
    on_validation_epoch_end(outputs)            this rank's metrics, one mapping a batch
    reduce the metrics over all ranks           once
    (on_validation_end(metrics) is the stage that follows)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from trial_core.controller.data.loaders import Loaders
from trial_core.controller.data.validation_set import ValidationSet
from trial_core.controller.reduction import reduce_metrics
from trial_core.controller.training import Ticker
from trial_core.controller.trial_engine import TrialEngine
from trial_core.distributed import DistributedContext
from trial_core.errors import TrialError
from trial_core.pytorch.reducer import BatchMetrics, Reducer
from trial_core.slots.stop_barrier import StopBarrier


class _BrokenOff(Exception):
    """The validation ends here, on every rank."""


def validate(
    engine: TrialEngine,
    loaders: Loaders,
    distributed: DistributedContext,
    ticker: Ticker,
    stop_barrier: StopBarrier,
) -> dict[str, Any] | None:
    """Validate on the whole set; metrics reduced over all ranks. Collective: every rank calls this.

    Where a forward pass needs other ranks (ZeRO-3, custom model parallelism), a rank whose shard
    is shorter than another's goes on with a batch that does not count: neither in the metrics nor
    in the custom reducers. With pipelines all ranks end with the shortest shard, because DeepSpeed
    averages a loss over all of them. Validation loaders need no length.

    Args:
        ticker: told now and then how many batches this rank has validated.
        stop_barrier: may break it off, on every rank. There are no metrics then, but None.

    Raises:
        TrialError: the set is empty, or too small for a pipeline; or the trial took more
            micro-batches than there are.
    """
    for callback in engine.callbacks.values():
        callback.on_validation_start()
    for callback in engine.callbacks.values():
        callback.on_validation_epoch_start()
    stop_barrier.begin_workload()
    engine.reducers.reset(for_validation=True)
    engine.set_training(False)
    contribution = None
    reducers: Any = engine.evaluation_reducer()
    try:
        with torch.no_grad():
            if engine.evaluates_full_dataset:
                metrics = _in_one_go(engine, loaders.validation, distributed)
                reducers = Reducer.AVG  # of a single value: the trial has reduced them
            else:
                metrics, contribution = _in_batches(
                    engine, loaders.validation, distributed, ticker, stop_barrier
                )
        if not stop_barrier.may_finish_workload():
            return None
    except _BrokenOff:
        return None
    finally:
        engine.set_training(True)
    outputs = metrics.per_batch()
    for callback in engine.callbacks.values():
        callback.on_validation_epoch_end(outputs)
    return reduce_metrics("validation", metrics, engine, distributed, reducers, contribution)


def _in_one_go(
    engine: TrialEngine, validation: ValidationSet, distributed: DistributedContext
) -> BatchMetrics:
    metrics = BatchMetrics("evaluate_full_dataset")
    if distributed.get_rank() == 0:
        metrics.add_batch([engine.evaluate_full_dataset(validation.whole())])
    return metrics


def _in_batches(
    engine: TrialEngine,
    validation: ValidationSet,
    distributed: DistributedContext,
    ticker: Ticker,
    stop_barrier: StopBarrier,
) -> tuple[BatchMetrics, list[Any] | None]:
    """The metrics; and what the custom reducers held before the first batch that did not count."""
    metrics = BatchMetrics("evaluate_batch")
    contribution = None
    batches = validation.begin()
    for batch_idx, counts in enumerate(validation.evaluations(batches, distributed)):
        if not stop_barrier.may_begin_step():
            raise _BrokenOff
        if not counts and contribution is None:
            contribution = engine.reducers.contribution("validation")
            if batches is not None:
                batches.go_on_with(validation.padding())
        outcome = _evaluate(engine, batches, batch_idx)
        if counts and engine.reports_metrics:
            metrics.add_batch([outcome])
        ticker.tick(batch_idx + 1)
    return metrics, contribution


def _evaluate(engine: TrialEngine, batches: Iterator[Any] | None, batch_idx: int) -> Any:
    try:
        return engine.evaluate_batch(batches, batch_idx)
    except StopIteration as end:
        raise TrialError(
            f"evaluate_batch asked for more micro-batches than the validation loader gave this "
            f"rank, in call {batch_idx} of the validation; take one in each call (with a pipeline, "
            "engine.eval_batch takes its own), and let the loader's len() be what it gives"
        ) from end
