"""A few threads for work that waits: reads, writes and digests, which free the interpreter lock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Event, Lock
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class WorkCancelled(Exception):
    """Work gave up because other work of the same call had failed. Never leaves `in_parallel`."""


class StopSignal:
    """Tells long work that its result is no longer wanted."""

    def __init__(self) -> None:
        self._event = Event()
        self._lock = Lock()
        self._calls: list[Callable[[], object]] = []

    def set(self) -> None:
        """Ask all work to stop at its next `check`, and wake what waits."""
        with self._lock:
            self._event.set()
            calls, self._calls = self._calls, []
        for call in calls:
            call()

    def check(self) -> None:
        """Call between pieces of long work.

        Raises:
            WorkCancelled: the work's result is no longer wanted.
        """
        if self._event.is_set():
            raise WorkCancelled

    @contextmanager
    def waking(self, call: Callable[[], object]) -> Iterator[None]:
        """Have `call` called, once, if the signal is set before the block ends: to end a wait.

        Raises:
            WorkCancelled: it is set already.
        """
        with self._lock:
            self.check()
            self._calls.append(call)
        try:
            yield
        finally:
            with self._lock:
                if call in self._calls:
                    self._calls.remove(call)


def in_parallel(
    work: Callable[[Item, StopSignal], Result], items: Iterable[Item], threads: int
) -> list[Result]:
    """The results of `work` on every item, in order, computed on at most `threads` threads.

    Once one fails no other is begun, those under way are asked to stop, and when they have, the
    first error is raised. So nothing still runs when this returns or raises.
    """
    stop = StopSignal()
    with ThreadPoolExecutor(threads, thread_name_prefix="trialflow-storage") as pool:
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
