"""Threads for work that waits or releases the interpreter lock: reads, writes and digests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Event, Lock
from typing import TypeVar

READ_THREADS = 8
"""Small objects read at once."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class WorkCancelled(Exception):
    """The work stopped because other work of the same call failed. The outermost `in_parallel`
    raises that failure instead."""


class CancelSignal:
    """Cancels running work, for example after a failure of other work."""

    def __init__(self) -> None:
        self._event = Event()
        self._lock = Lock()
        self._callbacks: list[Callable[[], object]] = []

    def set(self) -> None:
        """Make every later `check` raise, and run the registered callbacks."""
        with self._lock:
            self._event.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def check(self) -> None:
        """Call between pieces of long work. Raises WorkCancelled if the signal is set."""
        if self._event.is_set():
            raise WorkCancelled

    @contextmanager
    def calling(self, callback: Callable[[], object]) -> Iterator[None]:
        """Call `callback` once if the signal is set inside the block, to interrupt a wait. Raises
        WorkCancelled if it is set already."""
        with self._lock:
            self.check()
            self._callbacks.append(callback)
        try:
            yield
        finally:
            with self._lock:
                if callback in self._callbacks:
                    self._callbacks.remove(callback)


def in_parallel(
    work: Callable[[Item, CancelSignal], Result],
    items: Iterable[Item],
    threads: int,
    outer: CancelSignal | None = None,
) -> list[Result]:
    """Call `work` on every item, on at most `threads` threads; return the results in order.

    After the first failure no further item is started, running work is cancelled, and the first
    error is raised. No work is still running when this returns or raises. `outer`, the signal of
    the work that makes this call, cancels all work as well, with WorkCancelled.
    """
    stop = CancelSignal()
    with (
        (outer or CancelSignal()).calling(stop.set),
        ThreadPoolExecutor(threads, thread_name_prefix="trialflow-storage") as pool,
    ):
        futures = [pool.submit(work, item, stop) for item in items]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            return [future.result() for future in futures]
        finally:
            stop.set()
            for future in futures:
                future.cancel()


def read_all(read: Callable[[Item], Result | None], items: Iterable[Item]) -> list[Result]:
    """The results of `read` for all items, in order, without None. Raises its first error."""
    found = in_parallel(lambda item, _: read(item), items, READ_THREADS)
    return [each for each in found if each is not None]
