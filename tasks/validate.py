"""validate: the whole validation set, on every rank's shard of it."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from tasks.run import TrialRun
from trial_core.errors import TrialError
from trial_core.messages import RunValidation, Validated


@task(name="validate", task_run_name="validate @{batches_trained}", cache_policy=NO_CACHE)
def validate(run: TrialRun, batches_trained: int) -> float:
    """Validate; the value of the searcher's metric.

    Raises:
        TrialError: the trial does not report the searcher's metric.
    """
    with run.stage("validate", f"@{batches_trained}"):
        results = run.slots.request(RunValidation(), Validated)
    metrics = results[0].metrics
    run.stop_requested |= any(result.stop_requested for result in results)
    run.metrics["validation"] = metrics
    get_run_logger().info("validation at %d: %s", batches_trained, metrics)
    run.observer.metrics_reported("validation", batches_trained, metrics)
    return searcher_metric(metrics, run.config.searcher.metric)


def searcher_metric(metrics: dict[str, Any], name: str) -> float:
    """The metric that says which checkpoint is best.

    Raises:
        TrialError: there is none of that name, or it is no number.
    """
    value = metrics.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        seen = ", ".join(sorted(metrics)) or "none at all"
        what = "is not among" if name not in metrics else f"is {value!r}, no number, among"
        raise TrialError(
            f'searcher.metric "{name}" {what} the validation metrics that the trial reports: {seen}'
        )
    return float(value)
