from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from trial_core.checkpoint.storage.parallel import CancelSignal, WorkCancelled
from trial_core.checkpoint.storage.s3_storage import run_on_loop


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
    """It returns or raises what the coroutine does."""
    assert run_on_loop(loop, answer(), CancelSignal()) == 42
    with pytest.raises(ValueError, match="the cause"):
        run_on_loop(loop, fail(), CancelSignal())


def test_a_stopped_coroutine_has_ended(loop: asyncio.AbstractEventLoop) -> None:
    """The thread waits for a cancelled coroutine to end, so its buffer can be reused."""
    stop, begun = CancelSignal(), threading.Event()
    events: list[str] = []

    async def work() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            events.append("ended")

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(run_on_loop, loop, work(), stop)
        begun.wait(10)
        stop.set()
        with pytest.raises(WorkCancelled):
            waiting.result(10)
        assert events == ["ended"]


def test_nothing_begins_after_the_stop(loop: asyncio.AbstractEventLoop) -> None:
    """A stop signal that is already set cancels the coroutine before its first step."""
    stop, steps = CancelSignal(), list[int]()

    async def work() -> None:
        steps.append(1)
        await asyncio.Event().wait()

    stop.set()
    loop.call_soon_threadsafe(time.sleep, 0.2)  # keeps the loop busy
    with pytest.raises(WorkCancelled):
        run_on_loop(loop, work(), stop)
    assert steps == []
