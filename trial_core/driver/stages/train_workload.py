"""train-workload: trains up to a batch.

The whole route of a stop: `trial_core/schedule/stop_requests.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from trial_core.common.text_format import first_few, metrics_line, plural
from trial_core.driver.run import Launch
from trial_core.driver.stages.declared_stage import stage
from trial_core.messages import TrainBatches, Trained, WeightsSeen
from trial_core.observe.events.observers import WorkloadTimes
from trial_core.schedule.work import samples_of


@stage("train-workload", "[{begin}→{until}]", bucket="train", is_timed=False)
def train_workload(launch: Launch, begin: int, until: int) -> int:
    """Train from batch `begin` to `until`, or less far if the run is asked to stop.

    Returns the number of batches that are then trained in all.
    """
    run, answers = launch.run, launch.answers
    with train_workload.timed(launch, begin, until):
        stall_seconds = run.config.stopping.stall_timeout_seconds
        request = TrainBatches(until=until, watches_weights=run.test_mode is not None)
        results = launch.ask(request, Trained, stall_seconds)
        reached = results[0].batches_trained
        if copying := max(each.copy_seconds for each in results):
            run.clock.count_as("checkpoint_stall", copying)
        run.clock.batches_trained(reached)
    launch.note_stop_requests(results)
    if reached == begin:
        return reached
    launch.status.has_trained = True
    launch.status.batches_trained = reached
    answers.metrics["training"] = metrics = results[0].metrics
    warnings = launch.losses.trained(begin, reached, metrics, [each.non_finite for each in results])
    found = _untrained([each.weights for each in results if each.weights is not None])
    warnings += [each for each in found if each not in run.weight_warnings]
    run.weight_warnings.update(found)
    launch.warn(warnings + launch.losses.stepped(results[0]))
    seconds = max(result.seconds for result in results)
    assumed = (reached - begin) * answers.batch_samples
    samples = samples_of(each.samples for each in results) or assumed
    answers.extra_samples = samples - assumed
    now, whole_run = run.throughput.measured(
        reached - begin, seconds, results[0].work.times(samples),
        [rank.device for rank in results], [rank.peak_memory_bytes for rank in results],
    )  # fmt: skip
    run.logger.info(
        "trained [%d→%d] at %s: %s", begin, reached, now.speed, metrics_line(results[0].metrics)
    )
    waited = [each.data_seconds for each in results]
    forward = [each.forward_seconds for each in results]
    run.observer.training_timed(WorkloadTimes(reached, seconds, waited, forward, samples))
    run.observer.throughput_measured(reached, now, whole_run)
    run.observer.learning_rates_read(reached, results[0].learning_rates)
    run.observer.metrics_reported("training", reached, results[0].metrics)
    return reached


def _untrained(ranks: Sequence[WeightsSeen]) -> list[str]:
    """What is wrong with the weights of a test, for people. A rank may have a part of them."""
    if not ranks:
        return []
    got = {name for each in ranks for name in each.with_gradient}
    without = {name for each in ranks for name in each.without_gradient} - got
    if not got | without:
        return ["the test has trained nothing: no parameter of the models has requires_grad"]
    found = []
    if not any(each.has_changed for each in ranks):
        found.append(
            "no weight has changed in the test's batch: the trial's train_batch has to step the "
            "optimizer, as with context.step_optimizer or engine.step"
        )
    if without:
        found.append(
            f"{plural(len(without), 'parameter')} got no gradient in the test's batch: "
            f"{first_few(sorted(without))}; what gets none is not trained. If that is meant, set "
            "requires_grad to False"
        )
    return found
