"""Ranks agree on their last step, whatever they are doing when they are asked to hold."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from trial_core.messages import Envelope, FromDriver, Held, Hold, Ping, Proceed
from trial_core.slots.brake import TO_THE_END, Brake, Braking

PATIENCE = 20.0


class Ranks:
    """Brakes, each with a thread that hears the driver, as in a rank's worker."""

    def __init__(self, count: int) -> None:
        self.brakes = [Brake() for _ in range(count)]
        self.braking = Braking(count, self.send)
        self._ears = [ThreadPoolExecutor(1) for _ in range(count)]
        self._driver = ThreadPoolExecutor(1)

    def send(self, message: FromDriver) -> None:
        """To every rank, in order."""
        for rank, ear in enumerate(self._ears):
            ear.submit(self._hear, rank, message)

    def _hear(self, rank: int, message: FromDriver) -> None:
        brake = self.brakes[rank]
        if isinstance(message, Hold):
            steps = brake.hold(message.number)
            if steps is not None:
                held = Held(number=message.number, steps=steps)
                self._driver.submit(self.braking.rank_held, rank, held)
        elif isinstance(message, Proceed):
            brake.proceed(message.number, message.steps)
        else:
            brake.arrived(message.number)

    def close(self) -> None:
        """End the threads."""
        for ear in (*self._ears, self._driver):
            ear.shutdown()


@pytest.mark.parametrize("seed", range(40))
def test_all_ranks_end_after_the_same_step(seed: int) -> None:
    """Held at any moment of steps that need all ranks, none is left alone in one."""
    drawn = random.Random(seed)
    ranks, steps, hold_in_step = Ranks(3), drawn.randrange(1, 30), drawn.randrange(30)
    together, ask = threading.Barrier(3), threading.Event()

    def work(rank: int, jitter: random.Random) -> int:
        done = 0
        while done < steps and ranks.brakes[rank].lets_begin():
            if rank == 0 and done == hold_in_step:
                ask.set()
            for _ in range(jitter.randrange(200)):
                pass
            together.wait(PATIENCE)  # a collective: raises if a rank is missing
            done += 1
        return done

    def driver() -> None:
        ask.wait(PATIENCE)
        ranks.braking.hold(1)

    ranks.send(Envelope(number=1, request=Ping()))
    with ThreadPoolExecutor(4) as pool:
        asking = pool.submit(driver)
        working = [pool.submit(work, rank, random.Random(drawn.random())) for rank in range(3)]
        ended = [each.result(PATIENCE) for each in working]
        ask.set()
        asking.result(PATIENCE)
    ranks.close()
    assert len(set(ended)) == 1
    assert ended[0] <= steps
    if hold_in_step < steps:
        assert hold_in_step < ended[0]


def test_before_the_first_step_none_is_made() -> None:
    """A workload that comes when the run is to stop ends with nothing begun."""
    brake = Brake()
    brake.arrived(1, ends_at_once=True)
    assert not brake.lets_begin()
    assert not brake.lets_end()
    brake.arrived(2)
    assert brake.lets_begin()


def test_whoever_is_past_recall_takes_all_along() -> None:
    """A rank that can only go on to its end is waited for by nobody who has ended."""
    ranks = Ranks(2)
    ranks.send(Envelope(number=1, request=Ping()))
    for ear in ranks._ears:
        ear.submit(lambda: None).result(PATIENCE)
    assert ranks.brakes[0].lets_begin()
    assert ranks.brakes[0].lets_end()
    assert ranks.brakes[1].lets_begin()
    ranks.braking.hold(1)
    assert ranks.brakes[1].lets_begin()
    assert ranks.brakes[1].lets_end()
    ranks.close()


def test_a_late_word_does_not_hold_what_follows() -> None:
    """What was said of a workload that is over leaves the next one alone."""
    brake = Brake()
    brake.arrived(1)
    brake.arrived(2)
    assert brake.hold(1) is None
    brake.proceed(1, 0)
    assert brake.lets_begin()


def test_an_answer_to_an_earlier_hold_is_not_counted() -> None:
    """The ranks' answers are about one workload."""
    sent: list[Any] = []
    braking = Braking(2, sent.append)
    braking.hold(1)
    braking.hold(2)
    braking.rank_held(0, Held(number=1, steps=TO_THE_END))
    braking.rank_held(0, Held(number=2, steps=3))
    braking.rank_held(1, Held(number=2, steps=4))
    assert sent == [Hold(number=1), Hold(number=2), Proceed(number=2, steps=4)]
