"""validate: validates on the whole set, each rank on its shard. check-metrics: on one batch.

check-metrics learns the names of the metrics, so that a missing searcher metric is found early.
"""

from __future__ import annotations

from trial_core.common.text_format import metrics_line
from trial_core.driver.run import Launch
from trial_core.driver.stages.declared_stage import stage
from trial_core.messages import MetricsNamed, NameMetrics, RunValidation, Validated
from trial_core.schedule.sequencer import searcher_metric
from trial_core.schedule.stop_requests import completed_early


@stage("check-metrics", bucket="validate")
def check_metrics(launch: Launch) -> list[str] | None:
    """Return the names of the validation metrics; None if one batch does not tell them."""
    named = launch.ask(NameMetrics(), MetricsNamed)[0]
    launch.answers.may_add_metrics = named.may_be_more
    return named.names


@stage("validate", "@{batches_trained}", bucket="validate")
def validate(launch: Launch, batches_trained: int) -> bool:
    """Validate. Return False if a stop request broke it off."""
    run, answers = launch.run, launch.answers
    stall_seconds = run.config.stopping.stall_timeout_seconds
    results = launch.ask(RunValidation(), Validated, stall_seconds)
    launch.note_stop_requests(results)
    if results[0].is_broken_off:
        why = run.stopping.request or launch.status.moves or completed_early(answers.stop_reason)
        run.logger.info("validation at %d was broken off: %s", batches_trained, why)
        return False
    answers.validated = results[0].metrics
    return True


def report_validation(launch: Launch, batches_trained: int) -> float | None:
    """Report the metrics of a finished validation, once its hooks have run.

    Returns the searcher metric; None if the run has none. Raises TrialError if the trial does not
    report it.
    """
    run, answers = launch.run, launch.answers
    metrics = answers.validated
    run.logger.info("validated at %d: %s", batches_trained, metrics_line(metrics))
    run.observer.metrics_reported("validation", batches_trained, metrics)
    launch.warn(launch.losses.validated(batches_trained, metrics, run.metric))
    answers.metrics["validation"] = metrics
    return None if run.metric is None else searcher_metric(metrics, run.metric)
