"""train-workload: trains up to a batch.

The whole route of a stop: `trial_core/run/stop_requests.py`.
"""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from trial_core.messages import TrainBatches, Trained
from trial_core.text_format import metrics_line, training_speed
from trialflow.tasks.result_memory import forget_results
from trialflow.tasks.trial_run import TrialRun


@task(
    name="train-workload",
    task_run_name="train-workload [{begin}→{until}]",
    cache_policy=NO_CACHE,
)
def train_workload(run: TrialRun, begin: int, until: int) -> int:
    """Train from batch `begin` to `until`, or less far if the run is asked to stop.

    Returns:
        How many batches are then trained in all.
    """
    forget_results()  # no later task takes results of earlier workloads
    with run.stage("train-workload", f"[{begin}→{until}]"):
        stall_seconds = run.config.stopping.stall_timeout_seconds
        request = TrainBatches(until=until)
        results = run.slots.request(request, Trained, stall_seconds=stall_seconds)
        reached = results[0].batches_trained
        run.clock.batches_trained(reached)
    run.stop_requested |= any(result.stop_requested for result in results)
    if reached == begin:
        return reached
    run.has_trained = True
    run.batches_trained = reached
    run.metrics["training"] = results[0].metrics
    seconds = max(result.seconds for result in results)
    get_run_logger().info(
        "trained [%d→%d] at %s: %s",
        begin, reached, training_speed(reached - begin, run.batch_samples, seconds),
        metrics_line(results[0].metrics),
    )  # fmt: skip
    run.observer.training_timed(
        begin, reached, seconds,
        [rank.data_seconds for rank in results], [rank.forward_seconds for rank in results],
    )  # fmt: skip
    run.observer.learning_rates_read(reached, results[0].learning_rates)
    run.observer.metrics_reported("training", reached, results[0].metrics)
    return reached
