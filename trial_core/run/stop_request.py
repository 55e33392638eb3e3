"""Asking a run to stop: one way for Ctrl-C, SIGTERM, Cancel, Suspend and a time budget.

Whoever asks says why. The run then finishes its batch, saves, commits and ends, for which it has
its grace where somebody is about to end it by force; when that is over, or somebody asks for it to
end at once, its ranks are ended as they are, and the last committed checkpoint is what it leaves.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

Why = Literal["cancelled", "suspended", "preempted", "interrupted", "time budget"]


@dataclass(frozen=True)
class StopRequest:
    """Why a run was asked to stop.

    Attributes:
        why: what its end shall look like.
        detail: what happened, for people: ``SIGTERM``.
    """

    why: Why
    detail: str

    def __str__(self) -> str:
        return f"{self.why} ({self.detail})" if self.detail else self.why

    @property
    def is_urgent(self) -> bool:
        """Whether somebody is about to end the run by force."""
        return self.why not in ("suspended", "time budget")


class Stopping:
    """Whether a run has been asked to stop. A context manager: its thread ends with the block.

    `ask` and `at_once` may be called from a signal handler and from any thread: all they do is put
    something into a queue that is made for that. A thread of its own does the rest.

    Args:
        grace_seconds: from the first urgent `ask` until the ranks are ended as they are. A
            suspended run, and one whose time budget is over, take the time that saving takes.
    """

    def __init__(self, grace_seconds: float) -> None:
        self._grace_seconds = grace_seconds
        self._queue: queue.SimpleQueue[StopRequest | Literal["at once", "over"]] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._asked: StopRequest | None = None
        self._deadline: float | None = None
        self._has_expired = False
        self._was_asked = threading.Event()
        self._listener: tuple[Callable[[], None], Callable[[], None]] | None = None
        self._thread = threading.Thread(target=self._serve, name="stopping", daemon=True)

    def __enter__(self) -> Stopping:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._queue.put("over")
        self._thread.join()

    @property
    def asked(self) -> StopRequest | None:
        """The first request, once it has arrived; later ones change nothing."""
        return self._asked

    @property
    def has_expired(self) -> bool:
        """Whether the ranks were, or are being, ended as they are."""
        return self._has_expired

    @property
    def seconds_left(self) -> float | None:
        """Until the ranks are ended as they are; None: nothing is urgent."""
        if self._has_expired:
            return 0.0
        deadline = self._deadline
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def ask(self, why: Why, detail: str = "") -> None:
        """Ask the run to save and end. Returns at once."""
        self._queue.put(StopRequest(why, detail))

    def at_once(self) -> None:
        """Ask the run to end as it is. Returns at once."""
        self._queue.put("at once")

    def wait(self, seconds: float) -> bool:
        """Wait so long, or until the run is asked to stop; whether it is."""
        return self._was_asked.wait(seconds)

    @contextmanager
    def listening(self, stop: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
        """For the length of the block, call `stop` when the run is asked to stop, and `end` when
        its time is up; at once if that has happened already. Called in another thread."""
        with self._lock:
            self._listener = (stop, end)
            if self._asked is not None:
                stop()
            if self._has_expired:
                end()
        try:
            yield
        finally:
            with self._lock:
                self._listener = None

    # ------------------------------------------------------------------ the thread of its own

    def _serve(self) -> None:
        while True:
            try:
                said = self._queue.get(timeout=None if self._has_expired else self.seconds_left)
            except queue.Empty:
                said = "at once"
            if said == "over":
                return
            with self._lock:
                self._note(said)

    def _note(self, said: StopRequest | Literal["at once", "over"]) -> None:
        if isinstance(said, StopRequest):
            if said.is_urgent and self._deadline is None:
                self._deadline = time.monotonic() + self._grace_seconds
            if self._asked is not None:
                return
            self._asked = said
            self._was_asked.set()
            if self._listener is not None:
                self._listener[0]()
        elif not self._has_expired:
            self._has_expired = True
            if self._listener is not None:
                self._listener[1]()
