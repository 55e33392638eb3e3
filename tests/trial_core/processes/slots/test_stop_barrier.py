"""All ranks end after the same step, wherever they are when a stop is requested."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor, TimeoutError as FutureTimeout

import pytest

from tests.support.waiting import until
from trial_core.processes.slots.stop_barrier import Position, StopBarrier, StopCoordinator

WAIT_SECONDS = 20.0


class Ranks:
    """Stop barriers, each with a thread that receives the driver's messages, as in a worker."""

    def __init__(self, count: int) -> None:
        self.stop_barriers = [StopBarrier() for _ in range(count)]
        self.coordinator = StopCoordinator(count, self._pause, self._resume_until)
        self._receivers = [ThreadPoolExecutor(1) for _ in range(count)]
        self._driver = ThreadPoolExecutor(1)

    def _pause(self) -> None:
        for rank, receiver in enumerate(self._receivers):
            receiver.submit(self._receive_pause, rank)

    def _receive_pause(self, rank: int) -> None:
        at = self.stop_barriers[rank].pause()
        self._driver.submit(self.coordinator.rank_paused, rank, at)

    def _resume_until(self, end: Position, is_break: bool) -> None:
        for stop_barrier, receiver in zip(self.stop_barriers, self._receivers, strict=True):
            receiver.submit(stop_barrier.resume_until, end, is_break)

    def close(self) -> None:
        """End the threads."""
        for executor in (*self._receivers, self._driver):
            executor.shutdown()


def two_barriers_after_one_step() -> tuple[StopBarrier, StopBarrier]:
    barriers = StopBarrier(), StopBarrier()
    for barrier in barriers:
        barrier.begin_workload()
        assert barrier.may_begin_step()
    return barriers


@pytest.mark.parametrize(
    "seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(10, 40))]
)
def test_all_ranks_end_after_the_same_step(seed: int) -> None:
    """A stop at any moment leaves no rank alone in a step that needs all ranks."""
    drawn = random.Random(seed)
    ranks, steps, stop_in_step = Ranks(3), drawn.randrange(1, 20), drawn.randrange(40)
    collective, stop = threading.Barrier(3), threading.Event()

    def work(rank: int, jitter: random.Random) -> list[int]:
        done = []
        for _ in range(2):
            ranks.stop_barriers[rank].begin_workload()
            done.append(0)
            while done[-1] < steps and ranks.stop_barriers[rank].may_begin_step():
                if rank == 0 and sum(done) == stop_in_step:
                    stop.set()
                for _ in range(jitter.randrange(200)):
                    pass
                collective.wait(WAIT_SECONDS)  # raises if a rank is missing
                done[-1] += 1
        return done

    def driver() -> None:
        stop.wait(WAIT_SECONDS)
        ranks.coordinator.start()

    with ThreadPoolExecutor(4) as pool:
        stopping = pool.submit(driver)
        working = [pool.submit(work, rank, random.Random(drawn.random())) for rank in range(3)]
        ended = [each.result(WAIT_SECONDS) for each in working]
        stop.set()
        stopping.result(WAIT_SECONDS)
    ranks.close()
    assert ended[0] == ended[1] == ended[2]
    if stop_in_step < 2 * steps:
        assert stop_in_step < sum(ended[0])


@pytest.mark.parametrize(
    "seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(10, 60))]
)
def test_breaks_at_any_moment_end_workloads_alike(seed: int) -> None:
    """A break ends only the workloads that have breaks, after at least a step; others follow.

    A stop at any moment of that ends all, also if it comes while the ranks agree on a break.
    """
    drawn = random.Random(seed)
    ranks, steps = Ranks(3), drawn.randrange(1, 20)
    stop_in_step, has_breaks = drawn.randrange(120), [drawn.random() < 0.7 for _ in range(8)]
    breaks = {drawn.randrange(stop_in_step + 1) for _ in range(6)}  # a slot group has none later
    collective, rendezvous = threading.Barrier(3), threading.Barrier(3)

    def work(rank: int, jitter: random.Random) -> list[int]:
        done: list[int] = []
        for may_break in has_breaks:
            ranks.stop_barriers[rank].begin_workload(may_break)
            done.append(0)
            while done[-1] < steps and ranks.stop_barriers[rank].may_begin_step():
                if rank == 0 and sum(done) in breaks:
                    ranks.coordinator.start(is_break=True)
                if rank == 0 and sum(done) == stop_in_step:
                    ranks.coordinator.start()
                for _ in range(jitter.randrange(200)):
                    pass
                collective.wait(WAIT_SECONDS)  # raises if a rank is missing
                done[-1] += 1
            rendezvous.wait(WAIT_SECONDS)  # the driver asks for the next one once all have ended
        return done

    with ThreadPoolExecutor(3) as pool:
        working = [pool.submit(work, rank, random.Random(drawn.random())) for rank in range(3)]
        ended = [each.result(WAIT_SECONDS) for each in working]
    is_stopped = stop_in_step < sum(ended[0])
    if is_stopped:
        until(lambda: not any(each.may_begin_step() for each in ranks.stop_barriers), "a stop")
    ranks.close()
    assert ended[0] == ended[1] == ended[2]
    if not is_stopped:
        assert 0 not in ended[0]
        whole = [n for n, may_break in zip(ended[0], has_breaks, strict=True) if not may_break]
        assert set(whole) <= {steps}


def test_a_break_is_for_the_workload_that_was_asked_for() -> None:
    """Also if the ranks pause before they begin it; the one after that runs to its end."""
    barrier = StopBarrier()
    coordinator = StopCoordinator(1, lambda: None, barrier.resume_until)
    barrier.begin_workload(has_breaks=True)
    assert barrier.may_begin_step()
    barrier.expect_workload()
    coordinator.start(is_break=True)
    coordinator.rank_paused(0, barrier.pause())
    barrier.begin_workload(has_breaks=True)
    assert [barrier.may_begin_step() for _ in range(2)] == [True, False]
    barrier.begin_workload(has_breaks=True)
    assert all(barrier.may_begin_step() for _ in range(5))


def test_a_rank_that_requests_a_stop_pauses_at_once() -> None:
    """It begins no step before all have agreed; a later request does not undo the agreement."""
    barrier = StopBarrier()
    barrier.begin_workload()
    assert barrier.may_begin_step()
    barrier.pause_self()
    with ThreadPoolExecutor(1) as pool:
        next_step = pool.submit(barrier.may_begin_step)
        with pytest.raises(FutureTimeout):
            next_step.result(0.1)
        end = barrier.pause()
        assert end == Position(workload=1, steps=1)
        barrier.resume_until(end)
        assert next_step.result(WAIT_SECONDS) is False
    barrier.pause_self()
    assert not barrier.may_begin_step()


def test_after_a_stop_no_step_begins_until_reset() -> None:
    """A workload that follows the stop ends before its first step."""
    barrier = StopBarrier()
    barrier.begin_workload()
    assert barrier.may_begin_step()
    barrier.resume_until(barrier.pause())
    barrier.begin_workload()
    assert not barrier.may_begin_step()
    assert not barrier.may_finish_workload()
    barrier.reset()
    assert barrier.may_begin_step()


def test_a_rank_that_must_finish_its_workload_makes_all_finish() -> None:
    """If one rank can no longer end early, the others continue to the end as well."""
    finishing, behind = two_barriers_after_one_step()
    assert finishing.may_finish_workload()
    behind.resume_until(max(finishing.pause(), behind.pause()))
    assert behind.may_begin_step()
    assert behind.may_finish_workload()


def test_a_rank_in_an_earlier_workload_catches_up() -> None:
    """A stop may come when one rank has begun the next workload and another has not."""
    ahead, behind = two_barriers_after_one_step()
    ahead.begin_workload()
    assert ahead.may_begin_step()
    end = max(ahead.pause(), behind.pause())
    for barrier in (ahead, behind):
        barrier.resume_until(end)
    assert not ahead.may_begin_step()
    behind.begin_workload()
    assert behind.may_begin_step()
    assert not behind.may_begin_step()
