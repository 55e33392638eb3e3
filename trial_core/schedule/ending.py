"""The end of a run: one deadline for all that it waits for."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from trial_core.schedule.stop_requests import StopHandler

TOTAL_SECONDS = 60.0
# Within a grace period, for the release of the trial; and after one: Prefect kills 5 s later.
RESERVE_SECONDS, LEAST_SECONDS = 2.0, 3.0
POLL_SECONDS = 0.1


class Ending:
    """Limits how long the end of a run may wait, from the first question on.

    Without a deadline the limit is `TOTAL_SECONDS`. An urgent stop request shortens it, even one
    that comes while the end waits.
    """

    def __init__(
        self, stopping: StopHandler | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stopping = stopping
        self._clock = clock
        self._began: float | None = None

    @property
    def seconds_left(self) -> float:
        if self._began is None:
            self._began = self._clock()
        spent = self._clock() - self._began
        left = TOTAL_SECONDS - spent
        grace = None if self._stopping is None else self._stopping.seconds_left
        if grace is not None:
            left = min(left, max(grace - RESERVE_SECONDS, LEAST_SECONDS - spent))
        return max(0.0, left)

    def wait(self, is_over: Callable[[float], bool]) -> bool:
        """Wait for at most half of the time left, so that a hanging part leaves some for the rest.
        `is_over` waits at most so many seconds, and returns whether the part is over."""
        deadline = math.inf
        while (now := self._clock()) < deadline:
            deadline = min(deadline, now + self.seconds_left / 2)
            if is_over(min(POLL_SECONDS, deadline - now)):
                return True
        return False

    def join(self, thread: threading.Thread) -> bool:
        """Wait for the end of a thread, like `wait`."""

        def has_ended(seconds: float) -> bool:
            thread.join(seconds)
            return not thread.is_alive()

        return self.wait(has_ended)
