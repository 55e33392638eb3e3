"""Requests that not every rank has answered yet."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

from trial_core.errors import SlotsError
from trial_core.messages import AnyRequest, Result, RunScript


@dataclass
class PendingRequest:
    """A request, the results so far by rank, and the future of all results."""

    number: int
    request: AnyRequest
    future: Future[list[Result]] = field(default_factory=Future)
    results: dict[int, Result] = field(default_factory=dict)


class PendingRequests:
    """All pending requests of a slot group, by number. Thread-safe."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._lock = threading.Lock()
        self._number = 0
        self._pending: dict[int, PendingRequest] = {}

    def __bool__(self) -> bool:
        return bool(self._pending)

    def add(self, request: AnyRequest) -> PendingRequest:
        with self._lock:
            self._number += 1
            pending = self._pending[self._number] = PendingRequest(self._number, request)
        return pending

    def get(self, number: int) -> PendingRequest | None:
        return self._pending.get(number)

    def all(self) -> list[PendingRequest]:
        """All pending requests, in the order of their numbers."""
        with self._lock:
            return list(self._pending.values())

    def is_waiting_for_another(self, pending: PendingRequest) -> bool:
        """True if a script waits for its checkpoint's upload, or its `fit` for a stage of it.

        Those have their own stall timeouts.
        """
        return isinstance(pending.request, RunScript) and len(self._pending) > 1

    def note(self, rank: int, number: int, result: Result) -> None:
        """Note a rank's result. The last rank's result completes the future."""
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
        for pending in self.all():
            self.fail_one(pending, failure)

    def fail_one(self, pending: PendingRequest, failure: SlotsError) -> None:
        """Fail one request, unless it is complete."""
        with self._lock:
            is_pending = self._pending.pop(pending.number, None) is not None
        if is_pending:
            pending.future.set_exception(failure)
