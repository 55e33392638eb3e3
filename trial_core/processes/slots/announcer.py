"""Tells the driver what rank 0 is doing, if that takes long.

The driver shows it on the terminal, in the flow run's log and in the live report.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trial_core.common import text_format
from trial_core.messages import Activity

LOOK_SECONDS = 1.0
# A build that is up to date holds its lock for a moment.
FIRST_SPECIAL_SECONDS = 3.0
FIRST_SECONDS = 10.0
REPEAT_SECONDS = 15.0


class AnnouncementTimer:
    """Decides when to announce what a rank is doing."""

    def __init__(self, what: str, now: float) -> None:
        self._what = what
        self._current, self._began = what, now
        self._announced_at: float | None = None

    def due(self, special: str | None, now: float) -> str | None:
        """The announcement due now, of a more exact activity if there is one, or None."""
        current = special or self._what
        if current != self._current:
            self._current, self._began, self._announced_at = current, now, None
        seconds = now - self._began
        if self._announced_at is None:
            is_due = seconds >= (FIRST_SPECIAL_SECONDS if special else FIRST_SECONDS)
        else:
            is_due = now - self._announced_at >= REPEAT_SECONDS
        if not is_due:
            return None
        self._announced_at = now
        taken = f"{seconds:.0f} s" if seconds < 60 else text_format.duration(seconds)
        return f"{current}, for {taken}"


class Announcer:
    """Announces what the rank is doing, from a separate thread; nothing if `is_silent`."""

    def __init__(self, send: Callable[[Activity], None], is_silent: bool) -> None:
        self._send = send
        self._is_silent = is_silent

    @contextmanager
    def activity(
        self, what: str, special: Callable[[], str | None] = lambda: None
    ) -> Iterator[None]:
        """Announce `what`, or a more exact `special`, while the block takes long."""
        if self._is_silent:
            yield
            return
        has_ended = threading.Event()

        def announce() -> None:
            timer = AnnouncementTimer(what, time.monotonic())
            while not has_ended.wait(LOOK_SECONDS):
                if (text := timer.due(special(), time.monotonic())) is not None:
                    self._send(Activity(text=text))

        thread = threading.Thread(target=announce, name="announcer", daemon=True)
        thread.start()
        try:
            yield
        finally:
            has_ended.set()
            thread.join()
