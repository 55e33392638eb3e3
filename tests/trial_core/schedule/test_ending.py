"""How long the end of a run may wait."""

from __future__ import annotations

from typing import Any

import pytest

from trial_core.schedule.ending import (
    LEAST_SECONDS,
    POLL_SECONDS,
    RESERVE_SECONDS,
    TOTAL_SECONDS,
    Ending,
)


class Asked:
    """Stop requests, of which only the deadline counts."""

    seconds_left: float | None = None


class Clock:
    """A clock that a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now

    def hang(self, seconds: float) -> bool:
        """A wait for something that does not end."""
        self.now += seconds
        return False


@pytest.fixture
def asked() -> Any:
    return Asked()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ending(asked: Any, clock: Clock) -> Ending:
    return Ending(asked, clock)


def test_the_time_counts_from_the_first_question(ending: Ending, clock: Clock) -> None:
    """Once for all: a run that trains for a day has all of it at its end."""
    clock.now += 86400
    assert ending.seconds_left == TOTAL_SECONDS
    clock.now += 11
    assert ending.seconds_left == TOTAL_SECONDS - 11
    clock.now += TOTAL_SECONDS
    assert ending.seconds_left == 0


@pytest.mark.parametrize(
    ("until_killed", "left"),
    [
        (None, TOTAL_SECONDS),  # no request; Suspend, the time budget, a lost server
        (1e8, TOTAL_SECONDS),  # a script
        (17.0, 17.0 - RESERVE_SECONDS),
        (0.0, LEAST_SECONDS),  # the ranks took the whole grace period, or a second signal came
    ],
)
def test_a_deadline_limits_the_end(
    ending: Ending, asked: Any, until_killed: float | None, left: float
) -> None:
    asked.seconds_left = until_killed
    assert ending.seconds_left == left


def test_what_hangs_leaves_time_for_the_others(ending: Ending, clock: Clock) -> None:
    """Half of what is left, each time."""
    for spent in (TOTAL_SECONDS / 2, TOTAL_SECONDS * 3 / 4, TOTAL_SECONDS * 7 / 8):
        assert not ending.wait(clock.hang)
        assert clock.now - 1000 == pytest.approx(spent)


def test_a_request_during_a_wait_shortens_it(ending: Ending, asked: Any, clock: Clock) -> None:
    """A second signal ends it at once, if the least time is over."""

    def hang(seconds: float) -> bool:
        if clock.now >= 1000 + LEAST_SECONDS:
            asked.seconds_left = 0.0
        return clock.hang(seconds)

    assert not ending.wait(hang)
    assert clock.now - 1000 <= LEAST_SECONDS + 2 * POLL_SECONDS


def test_what_is_over_costs_no_time(ending: Ending, clock: Clock) -> None:
    """Also when no time is left."""
    assert ending.wait(lambda seconds: True)
    clock.now += 2 * TOTAL_SECONDS
    assert ending.wait(lambda seconds: True)
    assert not ending.wait(clock.hang)
