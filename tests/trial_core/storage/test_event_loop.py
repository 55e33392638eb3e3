from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from trial_core.storage.event_loop import LoopTask
from trial_core.storage.parallel import CancelSignal, WorkCancelled


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop on its own thread."""
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


def test_the_thread_gets_the_result_or_the_error(loop: asyncio.AbstractEventLoop) -> None:
    """`result` returns or raises what the coroutine does."""
    assert LoopTask(loop, answer()).result(CancelSignal()) == 42
    failed = LoopTask(loop, fail())
    with pytest.raises(ValueError, match="the cause"):
        failed.result(CancelSignal())
    assert failed.has_failed


def test_a_stopped_task_has_ended(loop: asyncio.AbstractEventLoop) -> None:
    """`result` waits for a cancelled coroutine to end, so its buffer can be reused."""
    stop, begun = CancelSignal(), threading.Event()
    events: list[str] = []

    async def work() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            events.append("coroutine ended")

    with ThreadPoolExecutor(1) as pool:
        task = LoopTask(loop, work(), lambda: events.append("on_end"))
        waiting = pool.submit(task.result, stop)
        begun.wait(10)
        stop.set()
        with pytest.raises(WorkCancelled):
            waiting.result(10)
    assert events == ["coroutine ended", "on_end"]


def test_a_task_stopped_before_the_wait_has_ended(loop: asyncio.AbstractEventLoop) -> None:
    """A stop signal that is already set cancels the coroutine too."""
    stop, ended = CancelSignal(), threading.Event()
    stop.set()
    with pytest.raises(WorkCancelled):
        LoopTask(loop, asyncio.Event().wait(), ended.set).result(stop)
    assert ended.is_set()


def test_on_end_is_called_once_for_a_task_that_never_began(
    loop: asyncio.AbstractEventLoop,
) -> None:
    """A borrowed buffer is released exactly once."""
    calls: list[int] = []
    released = threading.Event()
    loop.call_soon_threadsafe(released.wait, 10)  # keeps the loop busy
    task = LoopTask(loop, answer(), lambda: calls.append(1))
    task.cancel()
    task.cancel()
    released.set()
    task.wait()
    assert calls == [1]
