from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from trial_core.storage.event_loop import LoopTask
from trial_core.storage.parallel import StopSignal, WorkCancelled


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop on a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


async def answer() -> int:
    return 42


async def fail() -> int:
    raise ValueError("the cause")


def test_a_result_or_an_error_comes_back(loop: asyncio.AbstractEventLoop) -> None:
    """What the coroutine returns or raises is what the thread gets."""
    assert LoopTask(loop, answer()).result(StopSignal()) == 42
    failed = LoopTask(loop, fail())
    with pytest.raises(ValueError, match="the cause"):
        failed.result(StopSignal())
    assert failed.has_failed


def test_when_it_is_stopped_it_is_over(loop: asyncio.AbstractEventLoop) -> None:
    """A coroutine that takes its time to end is waited for, so that nobody reuses its buffer."""
    stop, begun = StopSignal(), threading.Event()
    lines: list[str] = []

    async def work() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            lines.append("over")

    with ThreadPoolExecutor(1) as pool:
        task = LoopTask(loop, work(), lambda: lines.append("on_end"))
        waiting = pool.submit(task.result, stop)
        begun.wait(10)
        stop.set()
        with pytest.raises(WorkCancelled):
            waiting.result(10)
    assert lines == ["over", "on_end"]


def test_what_was_stopped_before_is_over_as_well(loop: asyncio.AbstractEventLoop) -> None:
    """However late the signal is looked at, nothing goes on behind it."""
    stop, ended = StopSignal(), threading.Event()
    stop.set()
    with pytest.raises(WorkCancelled):
        LoopTask(loop, asyncio.Event().wait(), ended.set).result(stop)
    assert ended.is_set()


def test_the_end_is_told_once_also_of_what_never_began(loop: asyncio.AbstractEventLoop) -> None:
    """Who lent a buffer gets it back in any case."""
    told: list[int] = []
    released = threading.Event()
    loop.call_soon_threadsafe(released.wait, 10)  # the loop is busy
    task = LoopTask(loop, answer(), lambda: told.append(1))
    task.cancel()
    task.cancel()
    released.set()
    task.wait()
    assert told == [1]
