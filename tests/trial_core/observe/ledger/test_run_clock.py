"""The clock of a run, with fake seconds."""

from __future__ import annotations

import pytest

from tests.support.stages import all_stages
from trial_core.observe.ledger.run_clock import BUCKETS, RunClock


class Seconds:
    """Seconds that a test lets pass."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def seconds() -> Seconds:
    return Seconds()


@pytest.fixture
def clock(seconds: Seconds) -> RunClock:
    """The clock of a run on three slots, between two stages."""
    clock = RunClock(now=seconds)
    clock.has_slots(3)
    clock.switch("idle")
    return clock


def test_slot_seconds_of_a_run_by_stage(clock: RunClock, seconds: Seconds) -> None:
    """Nested blocks return to the bucket before."""
    with clock.spending("build"):
        seconds.now += 5
    seconds.now += 1
    with clock.spending("checkpoint_stall"):
        seconds.now += 7
        with clock.spending("validate"):
            seconds.now += 11
        seconds.now += 30
    assert clock.slot_milliseconds() == {
        "build": 15000, "validate": 33000, "checkpoint_stall": 111000, "idle": 3000,
    }  # fmt: skip


def test_buckets_add_up_exactly(clock: RunClock, seconds: Seconds) -> None:
    """No millisecond is lost or counted twice, whatever its fraction."""
    for i in range(1000):
        clock.switch(BUCKETS[i % len(BUCKETS)])
        seconds.now += 0.0007 * (i % 7)
        clock.slot_milliseconds()
        clock.batches_trained(i)
    whole = int(seconds.now * 1000) - 1000 * 1000
    assert sum(clock.slot_milliseconds().values()) == 3 * whole
    assert clock.seconds == whole / 1000


def test_time_before_the_slots_are_known_counts_as_many(seconds: Seconds) -> None:
    """Also the seconds before the clock existed; a later launch may have other slots."""
    clock = RunClock(waited_seconds=20, now=seconds)
    assert clock.slot_milliseconds() == {"queue": 20000}
    seconds.now += 1
    clock.switch("launch")
    seconds.now += 2
    clock.has_slots(3)
    assert clock.slot_milliseconds() == {"queue": 63000, "launch": 6000}
    clock.has_slots(5)
    seconds.now += 1
    assert clock.slot_milliseconds() == {"queue": 63000, "launch": 11000}
    assert clock.seconds == 24


def test_batches_that_were_trained_before_are_redone(clock: RunClock, seconds: Seconds) -> None:
    """A launch loses batches 4 to 13; the next one trains them again. Time is shared by batches."""
    clock.starts_at(0)
    with clock.spending("train"):
        seconds.now += 13
        clock.batches_trained(13)
    clock.starts_at(4)
    with clock.spending("train"):
        seconds.now += 4
        clock.batches_trained(8)
        assert clock.slot_milliseconds() == {"train": 39000, "redone": 12000}
        seconds.now += 10
        clock.batches_trained(18)  # five redone, five new
        seconds.now += 1
    assert clock.slot_milliseconds() == {"train": 39000 + 15000 + 3000, "redone": 27000}
    assert clock.trained_to == 18


def test_what_an_earlier_run_has_trained_is_redone(clock: RunClock, seconds: Seconds) -> None:
    """Also time that no batch has ended yet."""
    clock.continues(6)
    clock.starts_at(4)
    with clock.spending("train"):
        seconds.now += 1
        assert clock.slot_milliseconds() == {"redone": 3000}
        clock.batches_trained(6)
        seconds.now += 1
    assert clock.slot_milliseconds() == {"train": 3000, "redone": 3000}


def test_what_follows_the_last_batch_of_failed_ranks_is_idle(
    clock: RunClock, seconds: Seconds
) -> None:
    """Ranks that hang for an hour have trained nothing in it, although it looked like training."""
    clock.starts_at(0)

    def train_and_hang() -> None:
        with clock.spending("train"):
            seconds.now += 2
            clock.batches_trained(1)
            seconds.now += 3600
            assert clock.slot_milliseconds() == {"train": 3 * 3602 * 1000}
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train_and_hang()
    assert clock.slot_milliseconds() == {"train": 6000, "idle": 3 * 3600 * 1000}


def test_a_part_of_a_stage_counts_as_another_bucket(clock: RunClock, seconds: Seconds) -> None:
    """Building the loaders also restores; never more than was spent."""
    with clock.spending("build"):
        seconds.now += 5
        clock.count_as("restore", 2)
    assert clock.slot_milliseconds() == {"build": 9000, "restore": 6000}
    with clock.spending("build"):
        clock.count_as("restore", 99)
    assert clock.slot_milliseconds() == {"restore": 15000}


def test_the_time_of_a_hook_is_that_of_the_stage_before_it() -> None:
    bucket = all_stages()["callbacks"].bucket
    assert callable(bucket)
    assert bucket({"hook": "on_checkpoint_upload_end"}) == "checkpoint_stall"
    assert bucket({"hook": "on_trial_shutdown"}) is None


def test_a_move_to_other_nodes_is_a_drain_until_the_next_launch(
    clock: RunClock, seconds: Seconds
) -> None:
    """Its last batches are training. Waiting for nodes is queueing only before the first launch."""
    with clock.spending("train"):
        seconds.now += 1
        clock.drains()
        seconds.now += 2
    with clock.spending("checkpoint_stall"):
        seconds.now += 3
    seconds.now += 4
    clock.switch("launch")
    with clock.spending("queue"):
        seconds.now += 5
    seconds.now += 6
    clock.switch("idle")
    seconds.now += 7
    assert clock.slot_milliseconds() == {
        "launch": 18000, "train": 9000, "drain": 21000, "idle": 36000,
    }  # fmt: skip


def test_waiting_for_the_first_nodes_is_queueing(seconds: Seconds) -> None:
    clock = RunClock(now=seconds)
    clock.switch("launch")
    with clock.spending("queue"):
        seconds.now += 5
    clock.has_slots(2)
    assert clock.slot_milliseconds() == {"queue": 10000}


def test_lost_slots_are_not_counted_while_others_are_waited_for(seconds: Seconds) -> None:
    """Those that are left are idle. Without any the run is in the queue, for as many as it had."""
    clock = RunClock(now=seconds)
    clock.has_left(0)
    clock.has_slots(4)
    clock.switch("launch")
    clock.has_left(3)
    with clock.spending("queue"):
        seconds.now += 5
    clock.has_slots(4)
    clock.has_left(0)
    with clock.spending("queue"):
        seconds.now += 6
    clock.has_slots(2)
    seconds.now += 7
    assert clock.slot_milliseconds() == {"queue": 24000, "launch": 14000, "idle": 15000}
