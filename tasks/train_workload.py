"""train-workload: train up to a batch."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from tasks.run import TrialRun
from trial_core.messages import TrainBatches, Trained


@task(
    name="train-workload",
    task_run_name="train-workload [{begin}→{until}]",
    cache_policy=NO_CACHE,
)
def train_workload(run: TrialRun, begin: int, until: int) -> int:
    """Train from `begin` until `until` batches have been trained in all; how many that is."""
    with run.stage("train-workload", f"[{begin}→{until}]"):
        results = run.slots.request(TrainBatches(until=until), Trained)
    run.has_trained = True
    run.batches_trained = until
    run.stop_requested |= any(result.stop_requested for result in results)
    run.metrics["training"] = results[0].metrics
    seconds = max(result.seconds for result in results)
    samples = (until - begin) * run.batch_samples
    get_run_logger().info(
        "trained [%d→%d] at %.1f samples/s: %s", begin, until, samples / seconds, results[0].metrics
    )
    run.observer.metrics_reported("training", until, results[0].metrics)
    return results[0].batches_trained
