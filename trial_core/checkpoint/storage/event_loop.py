"""Runs coroutines on fsspec's event loop, from other threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from trial_core.checkpoint.storage.parallel import CancelSignal, WorkCancelled

Result = TypeVar("Result")


def run_on_loop(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Result], stop: CancelSignal
) -> Result:
    """Run a coroutine on another thread's event loop; it has ended when this returns or raises.

    The future of `asyncio.run_coroutine_threadsafe` counts as cancelled at once, while the
    coroutine may still write into a buffer.

    Raises:
        WorkCancelled: `stop` was set.
    """
    tasks: list[asyncio.Task[Result]] = []
    ended = threading.Event()

    def begin() -> None:
        tasks.append(loop.create_task(coroutine))
        tasks[0].add_done_callback(lambda _: ended.set())

    def cancel() -> None:
        loop.call_soon_threadsafe(lambda: tasks[0].cancel())  # after `begin`

    loop.call_soon_threadsafe(begin)
    try:
        with stop.calling(cancel):
            ended.wait()
    except BaseException:  # WorkCancelled, or Ctrl-C
        cancel()
        ended.wait()
        raise
    if tasks[0].cancelled():
        raise WorkCancelled
    return tasks[0].result()
