"""The decisions of the sequencer, in simulated runs from the first batch to the end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, strategies as st

from trial_core.errors import ConfigError
from trial_core.schedule.sequencer import (
    Checkpoint,
    CheckpointPolicy,
    Finish,
    Progress,
    Schedule,
    Train,
    Validate,
    Workload,
    has_more_to_do,
    next_workload,
)
from trial_core.schedule.units import Batch, Epoch, EpochLength, TrainUnit

EPOCH = EpochLength(micro_batches=10, micro_batches_per_batch=4)


@dataclass(frozen=True)
class Step:
    """A workload, and the progress after it."""

    workload: Workload
    progress: Progress


def metric_at(batches: int) -> float:
    """A metric that improves in some validations only."""
    return float(batches * 7919 % 31)


def simulate(
    schedule: Schedule,
    progress: Progress | None = None,
    *,
    metric: Callable[[int], float | None] = metric_at,
    stop_at: int | None = None,
) -> Iterator[Step]:
    """The workloads of a run; a stop is requested after batch `stop_at`."""
    progress = progress or Progress()
    for _ in range(10_000):
        workload = next_workload(progress, schedule, EPOCH)
        if isinstance(workload, Train):
            progress = progress.after_training(workload.until)
            progress = progress.stopping(stop_at is not None and workload.until >= stop_at)
        elif isinstance(workload, Validate):
            value = metric(progress.batches_trained)
            progress = progress.after_validation(value, schedule.smaller_is_better)
        elif isinstance(workload, Checkpoint):
            progress = progress.after_checkpoint()
        yield Step(workload, progress)
        if isinstance(workload, Finish):
            return
    raise AssertionError("the run does not end")


def at(steps: list[Step], kind: type[Workload]) -> list[int]:
    """The batches of all workloads of a type; for training, the last batch of each."""
    return [s.progress.batches_trained for s in steps if isinstance(s.workload, kind)]


def multiples(period: int, end: int) -> set[int]:
    return set(range(period, end + 1, period))


def in_7_11_13(
    max_length: TrainUnit, checkpoint_policy: CheckpointPolicy = "none", step_zero: bool = False
) -> Schedule:
    return Schedule(
        max_length=max_length,
        reporting_period=Batch(13),
        validation_period=Batch(7),
        checkpoint_period=Batch(11),
        checkpoint_policy=checkpoint_policy,
        step_zero_validation=step_zero,
    )


numbers = st.integers(1, 12)
any_period = st.one_of(
    st.builds(Batch, numbers),
    st.builds(Epoch, numbers),
    st.builds(Batch, st.frozensets(st.integers(1, 60), max_size=4)),
)
schedules = st.builds(
    Schedule,
    max_length=st.one_of(st.builds(Batch, st.integers(1, 60)), st.builds(Epoch, numbers)),
    reporting_period=st.none() | any_period,
    validation_period=st.none() | any_period,
    checkpoint_period=st.none() | any_period,
    checkpoint_policy=st.sampled_from(["best", "all", "none"]),
    smaller_is_better=st.booleans(),
    step_zero_validation=st.booleans(),
)


@given(st.integers(1, 400))
def test_periods_of_7_11_and_13_fire_exactly_when_due(end: int) -> None:
    """Each fires once at all its multiples and at the end, and at no other batch."""
    steps = list(simulate(in_7_11_13(Batch(end))))
    assert at(steps, Validate) == sorted(multiples(7, end) | {end})
    assert at(steps, Checkpoint) == sorted(multiples(11, end) | {end})
    stops = multiples(7, end) | multiples(11, end) | multiples(13, end) | {end}
    assert at(steps, Train) == sorted(stops)


@given(schedules)
def test_every_period_fires_when_due_and_only_then(schedule: Schedule) -> None:
    """For all combinations of batches and epochs, numbers and containers."""
    steps = list(simulate(schedule))
    trained = at(steps, Train)
    end = trained[-1]

    def due(period: TrainUnit | None) -> set[int]:
        return {b for b in range(1, end + 1) if period is not None and period.is_due(b, EPOCH)}

    at_start = {0} if schedule.step_zero_validation else set()
    assert at(steps, Validate) == sorted(due(schedule.validation_period) | {end} | at_start)
    assert due(schedule.reporting_period) <= set(trained)  # an automatic one is never due
    saved = at(steps, Checkpoint)
    assert due(schedule.checkpoint_period) | {end} <= set(saved)
    assert len(saved) == len(set(saved))
    only_validated = set(saved) - due(schedule.checkpoint_period) - {end}
    assert only_validated <= due(schedule.validation_period)


def test_a_continuous_checkpoint_is_due_after_each_train_workload() -> None:
    """It does not decide where one ends: an upload does. It may be skipped, but for the last."""
    schedule = Schedule(
        Batch(40), Batch(13), validation_period=Batch(7), checkpoint_period="continuous",
        checkpoint_policy="none",
    )  # fmt: skip
    steps = list(simulate(schedule))
    assert at(steps, Train) == at(steps, Checkpoint) == [7, 13, 14, 21, 26, 28, 35, 39, 40]
    saves = [step.workload for step in steps if isinstance(step.workload, Checkpoint)]
    assert saves == [Checkpoint(is_optional=True)] * 8 + [Checkpoint()]


@given(schedules)
def test_training_ends_exactly_at_its_length(schedule: Schedule) -> None:
    """Every train-workload trains at least one batch."""
    length = schedule.max_length
    assert isinstance(length.value, int)
    end = length.value if isinstance(length, Batch) else EPOCH.batches_until(length.value)
    trained = at(list(simulate(schedule)), Train)
    assert all(a < b for a, b in itertools.pairwise([0, *trained]))
    assert trained[-1] == end


@given(schedules)
def test_a_resumed_run_makes_the_same_decisions(schedule: Schedule) -> None:
    """From the progress in any checkpoint, the remaining workloads are the same."""
    steps = list(simulate(schedule))
    for i, step in enumerate(steps):
        if isinstance(step.workload, Checkpoint):
            assert list(simulate(schedule, step.progress)) == steps[i + 1 :]


@given(schedules, st.integers(1, 60))
def test_a_stopped_and_resumed_run_has_the_same_validations(
    schedule: Schedule, stop_at: int
) -> None:
    """A stop skips a due validation; the resumed run does it."""
    stopped = list(simulate(schedule, stop_at=stop_at))
    resumed = list(simulate(schedule, stopped[-1].progress.stopping(False)))
    both = at(stopped, Validate) + at(resumed, Validate)
    whole = at(list(simulate(schedule)), Validate)
    assert both == whole


@given(schedules, st.integers(1, 60))
def test_a_stop_saves_once_and_ends(schedule: Schedule, stop_at: int) -> None:
    """A checkpoint of the current batch follows the request, then nothing."""
    steps = list(simulate(schedule, stop_at=stop_at))
    requested = next((i for i, s in enumerate(steps) if s.progress.stop_requested), None)
    if requested is None:  # the run was over before
        return
    after = [type(s.workload) for s in steps[requested + 1 :]]
    assert after == [Checkpoint, Finish]
    assert steps[-1].progress.checkpointed_at == steps[-1].progress.batches_trained


def test_a_stop_before_the_first_batch_saves_nothing() -> None:
    """There is no trained state to save."""
    progress = Progress(stop_requested=True)
    assert next_workload(progress, in_7_11_13(Batch(20), step_zero=True)) == Finish()


def test_a_stop_right_after_a_checkpoint_does_not_save_twice() -> None:
    """The checkpoint of this state exists."""
    progress = Progress(batches_trained=11, checkpointed_at=11, stop_requested=True)
    assert next_workload(progress, in_7_11_13(Batch(20))) == Finish()


def test_the_order_is_train_validate_checkpoint() -> None:
    """So a checkpoint contains the validation of its state."""
    schedule = replace(in_7_11_13(Batch(77)), reporting_period=Batch(77))
    steps = [s.workload for s in simulate(schedule) if s.progress.batches_trained == 77]
    assert steps == [Train(77), Validate(), Checkpoint(), Finish()]


def test_step_zero_validation_comes_first() -> None:
    """Once, and without a checkpoint."""
    steps = list(simulate(in_7_11_13(Batch(7), "all", step_zero=True)))
    assert [s.workload for s in steps[:2]] == [Validate(), Train(7)]
    assert at(steps, Validate) == [0, 7]


@pytest.mark.parametrize(
    ("policy", "smaller_is_better", "saved"),
    [
        ("all", True, [1, 2, 3, 4, 5]),
        ("none", True, [5]),
        ("best", True, [1, 2, 4, 5]),
        ("best", False, [1, 3, 5]),
    ],
)
def test_the_checkpoint_policy(
    policy: CheckpointPolicy, smaller_is_better: bool, saved: list[int]
) -> None:
    """In addition to the end: all, none, or those better than all before (a tie is not)."""
    metrics = {1: 5.0, 2: 4.0, 3: 6.0, 4: 3.0, 5: 3.0}
    schedule = Schedule(
        max_length=Batch(5),
        reporting_period=Batch(5),
        validation_period=Batch(1),
        checkpoint_policy=policy,
        smaller_is_better=smaller_is_better,
    )
    assert at(list(simulate(schedule, metric=metrics.__getitem__)), Checkpoint) == saved


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), None])
def test_a_metric_that_is_not_a_finite_number_is_never_best(bad: float | None) -> None:
    """Else no later validation would be better than -inf. Nor is it kept from an old checkpoint."""
    progress = Progress(best_metric=bad).after_validation(2.0, smaller_is_better=True)
    assert (progress.improved, progress.best_metric) == (True, 2.0)
    progress = Progress(batches_trained=1).after_validation(bad, smaller_is_better=True)
    assert (progress.improved, progress.best_metric) == (False, None)
    good = progress.after_validation(2.0, smaller_is_better=True)
    assert (good.improved, good.best_metric) == (True, 2.0)
    again = good.after_validation(bad, smaller_is_better=True)
    assert (again.improved, again.best_metric) == (False, 2.0)


def test_a_run_past_its_maximum_length_only_validates_and_saves() -> None:
    """The maximum length may be lowered before a resume."""
    progress = Progress(batches_trained=30)
    steps = [s.workload for s in simulate(in_7_11_13(Batch(20)), progress)]
    assert steps == [Validate(), Checkpoint(), Finish()]


def test_periods_in_epochs_are_refused_without_a_loader_length() -> None:
    """The message has the period and what to do."""
    schedule = Schedule(Batch(10), Batch(5), validation_period=Epoch(1))
    with pytest.raises(ConfigError, match=r"Epoch\(1\).*give the period in batches"):
        next_workload(Progress(), schedule, None)


def test_a_container_is_searched_only_to_the_next_stop() -> None:
    """Not to the end of a very long run."""

    class Counting(frozenset[int]):
        lookups = 0

        def __contains__(self, item: object) -> bool:
            Counting.lookups += 1
            return super().__contains__(item)

    schedule = Schedule(Batch(10**9), Batch(100), validation_period=Batch(Counting({5})))
    assert next_workload(Progress(batches_trained=300), schedule) == Train(400)
    assert Counting.lookups <= 101


def test_only_a_periodic_checkpoint_may_be_skipped() -> None:
    """The best and the last checkpoints are always saved."""
    schedule = Schedule(Batch(12), Batch(4), validation_period=Batch(8), checkpoint_period=Batch(4))
    optional = {
        step.progress.batches_trained: step.workload.is_optional
        for step in simulate(schedule, metric=lambda _: 1.0)
        if isinstance(step.workload, Checkpoint)
    }
    assert optional == {4: True, 8: False, 12: False}


def test_a_postponed_checkpoint_is_due_after_the_next_workload() -> None:
    """Training continues; if the run then stops at this batch, it saves."""
    schedule = Schedule(Batch(12), Batch(4), checkpoint_period=Batch(4), checkpoint_policy="none")
    postponed = Progress(4).postponing_checkpoint()
    assert next_workload(postponed, schedule, EPOCH) == Train(8)
    assert next_workload(postponed.stopping(), schedule, EPOCH) == Checkpoint()
    later = postponed.after_training(5)
    assert next_workload(later, schedule, EPOCH) == Checkpoint(is_optional=True)
    assert next_workload(later.after_checkpoint(), schedule, EPOCH) == Train(8)
    again = later.postponing_checkpoint().after_training(7)
    assert next_workload(again, schedule, EPOCH) == Checkpoint(is_optional=True)


def test_a_refused_checkpoint_is_due_at_once() -> None:
    """Also at its own batch, and as the last one of a run that stops."""
    schedule = Schedule(Batch(12), Batch(4), checkpoint_period=Batch(8), checkpoint_policy="none")
    refused = Progress(4).after_checkpoint()
    assert next_workload(refused, schedule) == Train(8)
    here, later = (
        each.after_refusal(refused) for each in (refused, refused.after_training(5))
    )  # fmt: skip
    for each in (here, later):
        assert next_workload(each, schedule) == Checkpoint(is_optional=True)
        assert next_workload(each.stopping(), schedule) == Checkpoint()
        assert next_workload(each.after_checkpoint(), schedule) == Train(8)


@pytest.mark.parametrize(
    ("later", "best"),
    [
        (lambda best: best, 0.5),
        (lambda best: best.after_training(5), None),
        (lambda best: best.after_training(5).after_validation(0.7, True), None),
        (lambda best: best.after_training(5).after_validation(0.3, True), 0.3),
    ],
    ids=["at once", "later", "later and worse", "later and better"],
)
def test_a_best_state_that_is_lost_does_not_count(
    later: Callable[[Progress], Progress], best: float | None
) -> None:
    """Its checkpoint was refused after more batches were trained: the next validation is saved."""
    refused = Progress(4).after_validation(0.5, smaller_is_better=True).after_checkpoint()
    assert later(refused).after_refusal(refused).best_metric == best
    periodic = refused.after_training(6).after_checkpoint()
    assert periodic.after_training(8).after_refusal(periodic).best_metric == 0.5


def test_a_state_saved_before_its_best_validation_is_saved_again() -> None:
    """A stop during a validation saves without it; the resumed run validates and saves."""
    schedule = Schedule(Batch(1000), Batch(100), validation_period=Batch(400))
    stopped = Progress().after_training(400).stopping().after_checkpoint()
    validated = stopped.stopping(False).after_validation(0.1, smaller_is_better=True)
    assert next_workload(stopped.stopping(False), schedule) == Validate()
    assert next_workload(validated, schedule) == Checkpoint()
    assert next_workload(validated.after_checkpoint(), schedule) == Train(until=500)


def test_a_run_without_its_last_validation_has_more_to_do() -> None:
    """It was stopped after its last batch."""
    schedule = Schedule(Batch(400), Batch(100))
    trained = Progress().after_training(400).stopping().after_checkpoint()
    assert next_workload(trained, schedule) == Finish()
    assert has_more_to_do(trained, schedule, None)
    validated = trained.after_validation(0.1, smaller_is_better=True).after_checkpoint()
    assert not has_more_to_do(validated, schedule, None)
