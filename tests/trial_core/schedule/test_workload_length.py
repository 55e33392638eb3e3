"""The automatic length of train-workloads, in simulated runs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from tests.trial_core.schedule.test_sequencer import at, simulate
from trial_core.schedule.sequencer import (
    LONGEST,
    MAX_TASKS,
    MIN_REPORTS,
    Checkpoint,
    Progress,
    Schedule,
    Train,
    Validate,
    next_workload,
)
from trial_core.schedule.units import Batch

lengths = st.integers(1, MAX_TASKS * LONGEST // 2)
periods = st.none() | st.builds(Batch, st.integers(1, 10**6))
EARLY = 9
"""At most so many workloads end before half of the unit: 10, 20, 40, … 2560 batches."""


def ends(max_length: int, **schedule: Any) -> list[int]:
    """Where the train-workloads of a run end."""
    return at(list(simulate(Schedule(Batch(max_length), **schedule))), Train)


def tasks(schedule: Schedule) -> int:
    """Train-workloads, validations, saves and uploads."""
    steps = list(simulate(schedule, metric=lambda _: 1.0))
    return sum(len(at(steps, kind)) for kind in (Train, Validate, Checkpoint, Checkpoint))


def test_a_long_run_has_workloads_that_can_be_followed() -> None:
    """19 400 batches were 194 workloads of 100. The first reports still come early."""
    early, grid = [10, 20, 40, 80, 160, 320], list(range(1000, 18_001, 1000))
    assert ends(19_400) == [*early, *grid, 19_400]


def test_workloads_are_counted_from_validations_and_checkpoints() -> None:
    """So none is a hairline; a short rest joins the workload before it."""
    first, second = [10, 20, 40, 100, 200, 300, 437], [537, 637, 737, 874]
    assert ends(1748, validation_period=Batch(437))[:11] == first + second


@pytest.mark.parametrize(("length", "expected"), [(1, [1]), (12, [12]), (16, [10, 16])])
def test_a_short_run_has_workloads_of_10_batches(length: int, expected: list[int]) -> None:
    """Training metrics of fewer batches say little."""
    assert ends(length) == expected


@given(lengths, st.none() | st.integers(1, 60), st.none() | st.integers(1, 60))
@example(165_030, None, 11)  # a period that is a little longer than the longest workload
def test_a_run_has_50_tasks_unless_its_periods_ask_for_more(
    length: int, validations: int | None, checkpoints: int | None
) -> None:
    """Then it has few more than they ask for."""

    def schedule(reporting_period: Batch | None) -> Schedule:
        return Schedule(
            Batch(length), reporting_period,
            Batch(-(-length // validations)) if validations else None,
            Batch(-(-length // checkpoints)) if checkpoints else None,
        )  # fmt: skip

    asked_for = tasks(schedule(Batch(length)))
    reports = max(MIN_REPORTS, length // LONGEST)
    assert tasks(schedule(None)) <= max(MAX_TASKS, asked_for + reports + EARLY)


def test_a_very_long_run_has_more_tasks() -> None:
    """As the reference says: a rank keeps the metrics of at most 10 000 batches."""
    million = Schedule(Batch(1_000_000))
    assert 105 < tasks(million) < 115
    stops = [0, *ends(1_000_000)]
    assert max(b - a for a, b in itertools.pairwise(stops)) == LONGEST == 10_000


@given(lengths, periods, periods)
def test_no_workload_is_much_shorter_than_the_others(
    length: int, validation: Batch | None, checkpoint: Batch | None
) -> None:
    """After the first ones, only periods make short workloads."""
    schedule = Schedule(Batch(length), None, validation, checkpoint, checkpoint_policy="none")
    if any(period and period.value < length / 100 for period in (validation, checkpoint)):
        return  # the simulation would be long
    steps = list(simulate(schedule))
    stops = [0, *at(steps, Train)]
    due = {0, *at(steps, Validate), *at(steps, Checkpoint)}
    longest = max(b - a for a, b in itertools.pairwise(stops))
    for a, b in itertools.pairwise(stops):
        is_early = b <= longest
        asked_for = a in due and b in due
        assert asked_for or is_early or (b - a) * 3 >= longest


@given(st.integers(1, 3000), periods, periods, st.data())
def test_a_run_that_continues_at_any_batch_has_the_same_workloads(
    length: int, validation: Batch | None, checkpoint: Batch | None, data: st.DataObject
) -> None:
    """Also within a workload, where a stop request may have ended the run."""
    schedule = Schedule(Batch(length), None, validation, checkpoint)
    trained = data.draw(st.integers(0, length - 1))
    stopped = Progress(trained, validated_at=trained, checkpointed_at=trained)
    work = next_workload(stopped, schedule)
    assert isinstance(work, Train)
    stops = [0, *at(list(simulate(schedule)), Train)]
    assert work.until == next(stop for stop in stops if stop > trained)
