"""Ranks agree on their last step, whatever they are doing when they are asked to hold."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout

import pytest

from trial_core.slots.stop_barrier import Brake, Braking, Position

PATIENCE = 20.0


class Ranks:
    """Brakes, each with a thread that hears whoever brakes, as in a rank's worker."""

    def __init__(self, count: int) -> None:
        self.brakes = [Brake() for _ in range(count)]
        self.braking = Braking(count, self._hold, self._proceed)
        self._ears = [ThreadPoolExecutor(1) for _ in range(count)]
        self._driver = ThreadPoolExecutor(1)

    def _hold(self) -> None:
        for rank, ear in enumerate(self._ears):
            ear.submit(self._hear_hold, rank)

    def _hear_hold(self, rank: int) -> None:
        self._driver.submit(self.braking.rank_held, rank, self.brakes[rank].hold())

    def _proceed(self, end: Position) -> None:
        for brake, ear in zip(self.brakes, self._ears, strict=True):
            ear.submit(brake.proceed, end)

    def close(self) -> None:
        """End the threads."""
        for ear in (*self._ears, self._driver):
            ear.shutdown()


@pytest.mark.parametrize("seed", range(40))
def test_all_ranks_end_after_the_same_step(seed: int) -> None:
    """Held at any moment of steps that need all ranks, none is left alone in one."""
    drawn = random.Random(seed)
    ranks, steps, hold_in_step = Ranks(3), drawn.randrange(1, 20), drawn.randrange(40)
    together, ask = threading.Barrier(3), threading.Event()

    def work(rank: int, jitter: random.Random) -> list[int]:
        done = []
        for _ in range(2):
            ranks.brakes[rank].begin_workload()
            done.append(0)
            while done[-1] < steps and ranks.brakes[rank].lets_begin():
                if rank == 0 and sum(done) == hold_in_step:
                    ask.set()
                for _ in range(jitter.randrange(200)):
                    pass
                together.wait(PATIENCE)  # a collective: raises if a rank is missing
                done[-1] += 1
        return done

    def driver() -> None:
        ask.wait(PATIENCE)
        ranks.braking.start()

    with ThreadPoolExecutor(4) as pool:
        asking = pool.submit(driver)
        working = [pool.submit(work, rank, random.Random(drawn.random())) for rank in range(3)]
        ended = [each.result(PATIENCE) for each in working]
        ask.set()
        asking.result(PATIENCE)
    ranks.close()
    assert ended[0] == ended[1] == ended[2]
    if hold_in_step < 2 * steps:
        assert hold_in_step < sum(ended[0])


def test_a_rank_that_would_stop_holds_at_once() -> None:
    """It begins no step until all have agreed, nor counts it as begun; and what was agreed on
    stays so."""
    asking = Brake()
    asking.begin_workload()
    assert asking.lets_begin()
    asking.hold_here()
    with ThreadPoolExecutor(1) as pool:
        next_step = pool.submit(asking.lets_begin)
        with pytest.raises(FutureTimeout):
            next_step.result(0.1)
        end = asking.hold()
        assert end == Position(workload=1, steps=1)
        asking.proceed(end)
        assert next_step.result(PATIENCE) is False
    asking.hold_here()
    assert not asking.lets_begin()  # nor does it wait: nobody is told a second time


def test_once_held_nothing_more_begins() -> None:
    """A workload that comes after the stop ends with nothing begun, until all is forgotten."""
    brake = Brake()
    brake.begin_workload()
    assert brake.lets_begin()
    brake.proceed(brake.hold())
    brake.begin_workload()
    assert not brake.lets_begin()
    assert not brake.lets_end()
    brake.release()
    assert brake.lets_begin()


def test_whoever_is_past_recall_takes_all_along() -> None:
    """A rank that can only go on to its end is waited for by nobody who has ended."""
    ended, behind = Brake(), Brake()
    for brake in (ended, behind):
        brake.begin_workload()
        assert brake.lets_begin()
    assert ended.lets_end()
    end = max(ended.hold(), behind.hold())
    behind.proceed(end)
    assert behind.lets_begin()
    assert behind.lets_end()


def test_a_rank_that_has_not_begun_catches_up() -> None:
    """Ranks may be told while one has begun the next workload and another has not."""
    ahead, behind = Brake(), Brake()
    for brake in (ahead, behind):
        brake.begin_workload()
        assert brake.lets_begin()
    ahead.begin_workload()
    assert ahead.lets_begin()
    end = max(ahead.hold(), behind.hold())
    for brake in (ahead, behind):
        brake.proceed(end)
    assert not ahead.lets_begin()
    behind.begin_workload()
    assert behind.lets_begin()
    assert not behind.lets_begin()
