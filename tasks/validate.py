"""validate: validates on the whole set, each rank on its shard. check-metrics: one batch, before.

The names of the metrics are learnt from it, so that a missing searcher metric is found in time.
"""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from trial_core.messages import MetricsNamed, NameMetrics, RunValidation, Validated
from trial_core.run.searcher_metric import searcher_metric, with_single_number
from trial_core.text_format import metrics_line
from trialflow.tasks.trial_run import TrialRun


@task(name="check-metrics", task_run_name="check-metrics", cache_policy=NO_CACHE)
def check_metrics(run: TrialRun) -> list[str] | None:
    """The names of the validation metrics; None if one batch does not tell them."""
    with run.stage("check-metrics", ""):
        stall_seconds = run.config.stopping.idle_timeout_seconds
        results = run.slots.request(NameMetrics(), MetricsNamed, stall_seconds=stall_seconds)
    return results[0].names


@task(name="validate", task_run_name="validate @{batches_trained}", cache_policy=NO_CACHE)
def validate(run: TrialRun, batches_trained: int) -> bool:
    """Validate, and set `run.validated`. Return False if a stop request ended it early."""
    with run.stage("validate", f"@{batches_trained}"):
        stall_seconds = run.config.stopping.stall_timeout_seconds
        results = run.slots.request(RunValidation(), Validated, stall_seconds=stall_seconds)
    run.stop_requested |= any(result.stop_requested for result in results)
    if results[0].is_broken_off:
        get_run_logger().info(
            "validation at %d ended early: %s",
            batches_trained,
            run.stopping.request or run.moves or "as the trial asked",
        )
        return False
    run.validated = results[0].metrics
    return True


def report_validation(run: TrialRun, batches_trained: int) -> float:
    """Report the metrics of a finished validation, once its hooks have run: the searcher metric.

    Raises:
        TrialError: the trial does not report the searcher metric.
    """
    metrics = with_single_number(run.validated, run.config.searcher.metric)
    get_run_logger().info("validated at %d: %s", batches_trained, metrics_line(metrics))
    run.observer.metrics_reported("validation", batches_trained, metrics)
    metric = searcher_metric(metrics, run.config.searcher.metric)
    run.metrics["validation"] = metrics  # only now: without its metric it counts as no validation
    return metric
