"""Which of several failures is the first cause.

One rank's end is soon everybody's: its peers raise from the collectives that it has left, and may
be heard before it. So failures are collected for a moment before the group ends with one of them.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

from trial_core.errors import RankFailed

# How long, after a failure is noticed, others may report theirs.
CAUSE_SECONDS = 1.0


class FirstCause:
    """Collects failures, and settles on one of them once.

    Args:
        world_size: when so many ranks have failed, nobody else is waited for.
        settle: called in a thread of its own, with the first cause.
    """

    def __init__(self, world_size: int, settle: Callable[[RankFailed], None]) -> None:
        self._world_size = world_size
        self._settle = settle
        self._noted: list[RankFailed] = []
        self._changed = threading.Condition()

    def note(self, failure: RankFailed) -> None:
        """A rank has failed. Returns at once."""
        with self._changed:
            self._noted.append(failure)
            self._changed.notify_all()
            first = len(self._noted) == 1
        if first:
            threading.Thread(target=self._decide, name="first-cause", daemon=True).start()

    def _decide(self) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: len({f.rank for f in self._noted}) == self._world_size, CAUSE_SECONDS
            )
            # A death comes before any exception: a rank that raised stays alive until it is told
            # to end, so it breaks no collective, but a rank that died makes its peers raise.
            cause = min(self._noted, key=lambda failure: failure.error_type is not None)
        self._settle(cause)


def how_it_ended(code: int) -> tuple[int | None, str | None]:
    """A process's return code as (exit code, None) or (None, name of the signal)."""
    if code >= 0:
        return code, None
    try:
        return None, signal.Signals(-code).name
    except ValueError:
        return None, f"signal {-code}"  # real-time signals have no names
