"""Reduces the metrics of a workload over its batches and all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trial_core.errors import TrialError
from trial_core.messages import MetricsKind
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.trial.metric_reduction import (
    BatchMetrics,
    Partials,
    Reducer,
    calls_over_ranks,
    combine,
)
from trial_core.rank.trial.trial_adapter import TrialAdapter


def reduce_training(
    metrics: BatchMetrics, adapter: TrialAdapter, distributed: DistributedContext, with_calls: bool
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Reduce the metrics of a train-workload. Collective: every rank calls this.

    Every rank gets the same result. This is the workload's only wait for the accelerator, and one
    exchange between ranks; custom reducers need a second one.

    Args:
        with_calls: True if the metrics of single calls are wanted; the same on every rank.

    Returns:
        The averages, with custom reducers'; and for each call of train_batch its metrics, averaged
        over ranks; an empty list if they are not wanted.

    Raises:
        TrialError: ranks report different metrics, or a custom reducer has the name of another
            metric.
    """
    counts = adapter.reports_training_metrics
    own = metrics.partials(with_values=with_calls) if counts else Partials()
    partials = distributed.allgather(own)
    reduced = _with_custom("training", combine(partials), adapter, distributed)
    return reduced, calls_over_ranks(partials) if with_calls else []


def reduce_validation(
    metrics: BatchMetrics,
    adapter: TrialAdapter,
    distributed: DistributedContext,
    reducers: Reducer | Mapping[str, Reducer] = Reducer.AVG,
    contribution: list[Any] | None = None,
) -> dict[str, Any]:
    """Reduce the metrics of a validation. Collective: every rank calls this.

    Every rank gets the same result. Only ranks that report metrics count.

    Args:
        contribution: this rank's values for the custom reducers; None for their present values.

    Raises:
        TrialError: no batch was validated, ranks report different metrics, or a custom reducer has
            the name of another metric.
    """
    partials = distributed.allgather(metrics.partials() if adapter.reports_metrics else {})
    if not any(part.get("calls") for part in partials):
        raise TrialError(
            "there are no validation metrics: the validation loader gave not a single batch to any "
            "rank that reports metrics"
        )
    return _with_custom(
        "validation", combine(partials, reducers), adapter, distributed, contribution
    )


def _with_custom(
    kind: MetricsKind,
    reduced: dict[str, Any],
    adapter: TrialAdapter,
    distributed: DistributedContext,
    contribution: list[Any] | None = None,
) -> dict[str, Any]:
    custom = adapter.reducers.reduce(
        kind, distributed.allgather, counts=adapter.reports_metrics, contribution=contribution
    )
    duplicates = sorted(reduced.keys() & custom.keys())
    if duplicates:
        raise TrialError(
            f"{kind} metric(s) {', '.join(duplicates)} are both returned by the trial and given by "
            "a wrapped reducer; rename one of them"
        )
    return reduced | custom
