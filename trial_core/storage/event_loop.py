"""Work on fsspec's event loop, begun and awaited from threads.

What `asyncio.run_coroutine_threadsafe` gives says that it is cancelled as soon as somebody cancels
it, though the work may still be writing into a buffer. Here work is over when it says so.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from trial_core.storage.parallel import StopSignal, WorkCancelled

Result = TypeVar("Result")


class LoopTask(Generic[Result]):
    """A coroutine on another thread's event loop.

    Args:
        on_end: called once, when the coroutine does not run any more: however it ended, and also
            if it was cancelled before it began.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Coroutine[Any, Any, Result],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = loop
        self._work = work
        self._on_end = on_end
        self._task: asyncio.Task[Result] | None = None
        self._ended = threading.Event()
        loop.call_soon_threadsafe(self._begin)

    @property
    def has_failed(self) -> bool:
        """Whether it is over, and not with a result."""
        if self._task is None or not self._task.done():
            return False
        return self._task.cancelled() or self._task.exception() is not None

    def cancel(self) -> None:
        """Ask the coroutine to end."""
        self._loop.call_soon_threadsafe(self._cancel)

    def result(self, stop: StopSignal) -> Result:
        """Wait for the result. However this returns or raises, the coroutine is over.

        Raises:
            WorkCancelled: it was cancelled, because it is not wanted any more.
        """
        try:
            with stop.waking(self.cancel):
                self._ended.wait()
        except BaseException:  # Ctrl-C, or no longer wanted
            self.cancel()
            self._ended.wait()
            raise
        if self._task is None or self._task.cancelled():
            raise WorkCancelled
        return self._task.result()

    def wait(self) -> None:
        """Wait for the end, whatever it is. The coroutine goes on if this is interrupted."""
        self._ended.wait()

    async def end(self) -> None:
        """On the loop itself: cancel the coroutine, and wait until it is over."""
        self._cancel()
        if self._task is not None:
            await asyncio.wait([self._task])

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._work)
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _end(self, task: asyncio.Task[Result]) -> None:
        self._on_end()
        self._ended.set()
