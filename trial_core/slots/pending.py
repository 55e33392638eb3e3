"""Requests that not every rank has answered yet."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

from trial_core.errors import SlotsError
from trial_core.messages import AnyRequest, Result


@dataclass
class Pending:
    """A request on its way: who has answered, and who waits."""

    number: int
    request: AnyRequest
    future: Future[list[Result]] = field(default_factory=Future)
    results: dict[int, Result] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The request's name, for people."""
        return type(self.request).__name__


class PendingRequests:
    """All of them, by number. For any thread."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._lock = threading.Lock()
        self._number = 0
        self._pending: dict[int, Pending] = {}

    def __bool__(self) -> bool:
        return bool(self._pending)

    def add(self, request: AnyRequest) -> Pending:
        """A request that is about to be sent."""
        with self._lock:
            self._number += 1
            pending = self._pending[self._number] = Pending(self._number, request)
        return pending

    def get(self, number: int) -> Pending | None:
        """The one with that number; None where all have answered, or there never was one."""
        return self._pending.get(number)

    def all(self) -> list[Pending]:
        """All of them, in the order of their numbers."""
        with self._lock:
            return list(self._pending.values())

    def note(self, rank: int, number: int, result: Result) -> None:
        """A rank has answered. The last one ends the wait."""
        with self._lock:
            pending = self._pending.get(number)
            if pending is None:
                return
            pending.results[rank] = result
            if len(pending.results) < self._world_size:
                return
            del self._pending[number]
        pending.future.set_result([pending.results[each] for each in range(self._world_size)])

    def fail(self, failure: SlotsError) -> None:
        """Nobody will answer any more: whoever waits raises `failure`."""
        with self._lock:
            waiting, self._pending = list(self._pending.values()), {}
        for pending in waiting:
            pending.future.set_exception(failure)

    def fail_one(self, pending: Pending, failure: SlotsError) -> None:
        """It could not be sent: whoever waits for it raises `failure`."""
        with self._lock:
            is_pending = self._pending.pop(pending.number, None) is not None
        if is_pending:
            pending.future.set_exception(failure)

    def silent_on(self, pending: Pending) -> list[int]:
        """The ranks that have not answered it."""
        with self._lock:
            return sorted(set(range(self._world_size)) - set(pending.results))
