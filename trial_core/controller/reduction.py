"""One rank's metrics of a workload, made into everybody's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trial_core.controller.trial_engine import TrialEngine
from trial_core.distributed import DistributedContext
from trial_core.errors import TrialError
from trial_core.pytorch.reducer import BatchMetrics, Reducer, combine
from trial_core.run.observer import MetricsKind


def reduce_metrics(
    kind: MetricsKind,
    metrics: BatchMetrics,
    engine: TrialEngine,
    distributed: DistributedContext,
    reducers: Reducer | Mapping[str, Reducer] = Reducer.AVG,
    contribution: list[Any] | None = None,
) -> dict[str, Any]:
    """Reduce per-batch metrics, and the trial's custom ones, over all batches of all ranks.

    Collective: every rank calls this, and gets the same. Only what ranks that report metrics have
    gathered counts. The only place where a workload waits for the accelerator.

    Args:
        contribution: what the custom reducers held when they were last to be believed; None: now.

    Raises:
        TrialError: nothing was validated, ranks report different metrics, or a custom one has
            the name of another.
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
    twice = sorted(reduced.keys() & custom.keys())
    if twice:
        raise TrialError(
            f"{kind} metric(s) {', '.join(twice)} are both returned by the trial and given by a "
            "wrapped reducer; name one of them otherwise"
        )
    return reduced | custom
