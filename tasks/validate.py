"""validate: the whole validation set, on every rank's shard of it."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from tasks.run import TrialRun
from trial_core.messages import RunValidation, Validated
from trial_core.searcher import searcher_metric


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
