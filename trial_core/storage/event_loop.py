"""Coroutines on fsspec's event loop, started and awaited from other threads.

The future of `asyncio.run_coroutine_threadsafe` counts as cancelled at once, while the coroutine
may still write into a buffer. A `LoopTask` has ended only when its coroutine has.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from trial_core.storage.parallel import CancelSignal, WorkCancelled

Result = TypeVar("Result")


class LoopTask(Generic[Result]):
    """A coroutine on another thread's event loop.

    Args:
        on_end: called once when the coroutine has ended, also if it was cancelled before it began.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, Result],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = loop
        self._coroutine = coroutine
        self._on_end = on_end
        self._task: asyncio.Task[Result] | None = None
        self._ended = threading.Event()
        loop.call_soon_threadsafe(self._begin)

    @property
    def has_failed(self) -> bool:
        """Whether the coroutine has ended without a result."""
        if self._task is None or not self._task.done():
            return False
        return self._task.cancelled() or self._task.exception() is not None

    def cancel(self) -> None:
        """Ask the coroutine to end."""
        self._loop.call_soon_threadsafe(self._cancel)

    def result(self, stop: CancelSignal) -> Result:
        """Wait for the result. The coroutine has ended when this returns or raises.

        Raises:
            WorkCancelled: `stop` was set, or the task was cancelled.
        """
        try:
            with stop.calling(self.cancel):
                self._ended.wait()
        except BaseException:  # WorkCancelled, or Ctrl-C
            self.cancel()
            self._ended.wait()
            raise
        if self._task is None or self._task.cancelled():
            raise WorkCancelled
        return self._task.result()

    def wait(self) -> None:
        """Wait until the coroutine has ended. An interrupt of this wait does not cancel it."""
        self._ended.wait()

    async def end(self) -> None:
        """Cancel the coroutine and wait until it has ended. Call on the event loop."""
        self._cancel()
        if self._task is not None:
            await asyncio.wait([self._task])

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._coroutine)
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _end(self, task: asyncio.Task[Result]) -> None:
        self._on_end()
        self._ended.set()
