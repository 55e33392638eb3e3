"""Reduces the metrics of a workload over its batches and all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trial_core.controller.trial_engine import TrialEngine
from trial_core.distributed import DistributedContext
from trial_core.errors import TrialError
from trial_core.pytorch.metric_reduction import BatchMetrics, Reducer, combine
from trial_core.run.observer import MetricsKind


def reduce_metrics(
    kind: MetricsKind,
    metrics: BatchMetrics,
    engine: TrialEngine,
    distributed: DistributedContext,
    reducers: Reducer | Mapping[str, Reducer] = Reducer.AVG,
    contribution: list[Any] | None = None,
) -> dict[str, Any]:
    """Reduce per-batch metrics and custom reducers. Collective: every rank calls this.

    Every rank gets the same result. Only ranks that report metrics count. In a train-workload,
    this is the only wait for the accelerator.

    Args:
        contribution: this rank's values for the custom reducers; None: their present values.

    Raises:
        TrialError: no batch was validated, ranks report different metrics, or a custom reducer has
            the name of another metric.
    """
    partials = distributed.allgather(metrics.partials() if engine.reports_metrics else {})
    if kind == "validation" and not any(part.get("batches") for part in partials):
        raise TrialError(
            "there are no validation metrics: the validation loader gave not a single batch to any "
            "rank that reports metrics"
        )
    reduced: dict[str, Any] = combine(partials, reducers)
    custom = engine.reducers.reduce(
        kind, distributed.allgather, counts=engine.reports_metrics, contribution=contribution
    )
    duplicates = sorted(reduced.keys() & custom.keys())
    if duplicates:
        raise TrialError(
            f"{kind} metric(s) {', '.join(duplicates)} are both returned by the trial and given by "
            "a wrapped reducer; rename one of them"
        )
    return reduced | custom
