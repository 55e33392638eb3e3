"""Stop requests to a run: Ctrl-C, SIGTERM, Cancel, Suspend and the time budget.

A run that is asked to stop finishes its batch, saves, commits and ends. An urgent request gives it
a grace period for that. When the grace period is over, or on `kill_now`, the ranks are killed
without saving, and the last committed checkpoint is the result.

The whole route of a stop, from a Cancel in Prefect to the final state of the flow run:

1. Prefect's worker sends SIGTERM to the driver, or only the state of the flow run changes.
2. `flows/lifecycle/stop_signals.py` handles the signal, and `flows/lifecycle/stop_monitor.py` polls
   the state. Both call `ask`.
3. `schedule/stop_requests.py` keeps the first request and its deadline, and tells its subscriber.
4. `driver/drive.py` (`stopping_ranks`) is the subscriber. It calls `SlotGroup.stop`, or
   `SlotGroup.abort` if there is nothing to save or the deadline has passed.
5. `processes/slots/slot_group.py` sends `PauseSteps` to all ranks, for its `StopCoordinator`.
6. `processes/slots/rank_server.py` pauses its `StopBarrier`, and replies with the rank's position.
7. `processes/slots/stop_barrier.py` (`StopCoordinator`) has all ranks continue to the greatest
   position, by `ResumeUntil`.
8. `rank/training.py` asks the barrier before each batch, and ends the workload there. A
   validation (`rank/validation.py`) ends without a result.
9. `driver/stages/train_workload.py` returns the batch that was reached.
10. `driver/loop.py` asks whether it should stop, and the sequencer decides: save, then finish.
11. `driver/stages/checkpoint.py` has `checkpoint-save` and `checkpoint-upload`, which commits.
12. `driver/drive.py` ends the ranks and the run.
13. `flows/lifecycle/stop_monitor.py` (`final_state`) gives the flow run its state.

A stop that the trial requests begins on its rank: the controller pauses its own barrier and sends
`StopRequested`, and the slot group continues at step 5. In a script that another program has
started, a signal to any rank goes to the driver, which calls `ask`:
`processes/slots/joined_rank.py`, and `rank/core_api/init.py`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

from trial_core.common import text_format
from trial_core.errors import Stopped

StopReason = Literal[
    "cancelled", "suspended", "preempted", "interrupted", "time budget", "server lost"
]
# How long the end of a run waits to learn who sent a signal.
CLARIFY_SECONDS = 5.0


@dataclass(frozen=True)
class StopRequest:
    """Why a run was asked to stop. The reason decides the final state of the flow run; the detail
    is for people: ``SIGTERM``."""

    reason: StopReason
    detail: str

    def __str__(self) -> str:
        return f"{self.reason} ({self.detail})" if self.detail else self.reason

    @property
    def is_signal(self) -> bool:
        """True if a signal asked, which does not tell who sent it."""
        return self.reason in ("preempted", "interrupted")

    @property
    def is_urgent(self) -> bool:
        """True if the run will be killed unless it ends within its grace period."""
        return self.reason not in ("suspended", "time budget", "server lost")


def completed_early(reason: str | None) -> str:
    """How a run has ended that its trial has ended, for people."""
    return "completed early" + why_early(reason)


def why_early(reason: str | None) -> str:
    """Why a trial has ended its run; to be appended to a clause."""
    return f": {text_format.one_line(reason)}" if reason else ", as the trial asked"


def outcome_of(status: str) -> tuple[str, str]:
    """Return the outcome, ``completed``, ``stopped`` or ``failed``, and why, of a run's status."""
    how, _, why = status.partition(": ")
    return how.partition(" ")[0], why


def how_it_ended(error: BaseException, stopping: StopHandler) -> str:
    """How a run that raised `error` has ended, for people: ``failed: why`` or ``stopped: why``."""
    is_stop = isinstance(error, Stopped) or not isinstance(error, Exception)
    reason = str(error) or type(error).__name__
    request = stopping.final_request()
    if is_stop and request is not None:
        reason = f"{request}; {reason}"
    return f"{'stopped' if is_stop else 'failed'}: {reason}"


class StopHandler:
    """Keeps a run's first stop request and its deadline, and notifies one subscriber.

    A Cancel may arrive as a signal, which stops the run at once. The Cancel itself, which is seen
    in Prefect a moment later, then replaces the signal as the reason.

    A context manager; its thread ends with the block. `ask` and `kill_now` only put an item into a
    reentrant queue, so a signal handler and any thread may call them.

    Args:
        grace_seconds: from the first urgent request until the ranks are killed. Other requests have
            no deadline.
    """

    def __init__(self, grace_seconds: float) -> None:
        self._grace_seconds = grace_seconds
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._request: StopRequest | None = None
        self._deadline: float | None = None
        self._has_expired = False
        self._was_asked = threading.Event()
        self._is_clear = threading.Event()
        self._is_clear.set()
        self._subscriber: tuple[Callable[[], None], Callable[[], None]] | None = None
        self._thread = threading.Thread(target=self._serve, name="stop-handler", daemon=True)

    def __enter__(self) -> StopHandler:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._queue.put(None)
        self._thread.join()

    @property
    def request(self) -> StopRequest | None:
        """The first request. If it is a signal, a later Cancel or Suspend replaces it."""
        return self._request

    def final_request(self) -> StopRequest | None:
        """The request, once it is known who asked; for texts that people read after a run.

        Waits once for an answer, and not after the grace period: a run that asks several times must
        end before its worker kills it.
        """
        left = self.seconds_left
        if not self._is_clear.wait(CLARIFY_SECONDS if left is None else min(CLARIFY_SECONDS, left)):
            self._is_clear.set()
        return self._request

    @property
    def has_expired(self) -> bool:
        """True if the grace period is over: the ranks are killed without saving."""
        return self._has_expired

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the ranks are killed; None without an urgent request."""
        if self._has_expired:
            return 0.0
        deadline = self._deadline
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def ask(self, reason: StopReason, detail: str = "", is_clear: bool = True) -> None:
        """Ask the run to save and end. Returns at once.

        Args:
            is_clear: True if it is known who asked. If not, `clarified` follows.
        """
        if not is_clear:
            self._queue.put(self._is_clear.clear)
        self._queue.put(partial(self._note, StopRequest(reason, detail)))

    def clarified(self) -> None:
        """Note that all requests so far have told who asked. Returns at once."""
        self._queue.put(self._is_clear.set)

    def kill_now(self) -> None:
        """End the grace period now: the ranks are killed without saving. Returns at once."""
        self._queue.put(self._expire)

    def wait(self, seconds: float) -> bool:
        """Wait for a stop request, at most `seconds`. Return whether there is one."""
        return self._was_asked.wait(seconds)

    @contextmanager
    def subscribed(
        self, on_stop: Callable[[], None], on_expired: Callable[[], None]
    ) -> Iterator[None]:
        """Within the block, call `on_stop` at the first request and `on_expired` at the deadline.

        Events from before the block are reported when it begins. Both functions are called in the
        handler's thread.
        """
        with self._lock:
            self._subscriber = (on_stop, on_expired)
            if self._request is not None:
                on_stop()
            if self._has_expired:
                on_expired()
        try:
            yield
        finally:
            with self._lock:
                self._subscriber = None

    # ------------------------------------------------------------------ the handler's thread

    def _serve(self) -> None:
        while True:
            try:
                event = self._queue.get(timeout=None if self._has_expired else self.seconds_left)
            except queue.Empty:
                event = self._expire
            if event is None:
                self._is_clear.set()  # nobody will say who asked
                return
            with self._lock:
                event()

    def _note(self, request: StopRequest) -> None:
        if request.is_urgent and self._deadline is None:
            self._deadline = time.monotonic() + self._grace_seconds
        if self._request is not None:
            if self._request.is_signal and request.reason in ("cancelled", "suspended"):
                self._request = request
            return
        self._request = request
        self._was_asked.set()
        if self._subscriber is not None:
            self._subscriber[0]()

    def _expire(self) -> None:
        if self._has_expired:
            return
        self._has_expired = True
        if self._subscriber is not None:
            self._subscriber[1]()
