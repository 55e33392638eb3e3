"""A limit by progress on a process that moves files: however long it takes, it must get on.

The process itself is not asked, since it may be stopped, or inside a call of the system's that
never returns: the system counts the bytes that it reads and writes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType

import psutil

from trial_core.run.timeouts import TRANSFER_STALL_SECONDS

_logger = logging.getLogger(__name__)

STALL_SECONDS = TRANSFER_STALL_SECONDS
"""How long nothing may be moved, where nobody says. A disk that has taken much into memory may need
minutes until all of it is there for good, and meanwhile nothing moves that could be seen. Three
tries of a rank take less than others wait for it (`meeting.PATIENCE_SECONDS`): so they hear why."""

NEWS_SECONDS = 300.0
"""How often to log that a long transfer gets on. Whoever watches the rank from outside must hear of
it: the rank itself does nothing meanwhile."""

LEAST_BYTES = 2**20
"""What tells a file that is moved from logs, and from event loops that wake each other. Files that
are shorter count as they are stored."""

LOOKS = 10
"""How often to look, at least, before the limit is reached."""

_LOOK_SECONDS = 5.0


class StallWatch:
    """Watches a process while it does something: a block.

    Args:
        limit_seconds: for how long it may move nothing; None: for ever.
        on_stall: called once, in the watch's own thread, when it has moved nothing for that long.

    Attributes:
        has_stalled: whether it was.
    """

    def __init__(self, pid: int, limit_seconds: float | None, on_stall: Callable[[], None]) -> None:
        self.has_stalled = False
        self._pid = pid
        self._limit_seconds = limit_seconds
        self._on_stall = on_stall
        self._signs = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall-watch", daemon=True)

    def __enter__(self) -> StallWatch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def verdict(self) -> str | None:
        """What to say of a process that has stalled."""
        if not self.has_stalled:
            return None
        return (
            f"has moved nothing for {self._limit_seconds:g} s, and was ended "
            "(checkpointing.stall_timeout_seconds): see why the storage, or a disk of this "
            "machine, does not answer"
        )

    def note_sign(self) -> None:
        """The process has said something."""
        self._signs += 1

    def _watch(self) -> None:
        limit = self._limit_seconds
        look_seconds = _LOOK_SECONDS if limit is None else min(_LOOK_SECONDS, limit / LOOKS)
        # Looks are counted, not seconds: while this process was stopped, that one may have been.
        quiet_looks, seen = 0, (self._signs, self._moved_bytes() or 0)
        news_at = time.monotonic()
        while not self._is_over.wait(look_seconds):
            signs, moved_bytes = self._signs, self._moved_bytes()
            if moved_bytes is None:
                continue  # the system does not tell, or the process has ended
            if signs == seen[0] and moved_bytes < seen[1] + LEAST_BYTES:
                quiet_looks += 1
                if limit is not None and quiet_looks * look_seconds >= limit:
                    self.has_stalled = True
                    self._on_stall()
                    return
                continue
            quiet_looks, seen = 0, (signs, moved_bytes)
            if time.monotonic() >= news_at + NEWS_SECONDS:
                news_at = time.monotonic()
                _logger.info(
                    "files of a checkpoint are still being moved: so far this process's helper "
                    "has read and written %.1f GiB", moved_bytes / 2**30,
                )  # fmt: skip

    def _moved_bytes(self) -> int | None:
        """What the process has read and written of files so far, as far as that is known."""
        try:
            counters = psutil.Process(self._pid).io_counters()
        except (psutil.Error, AttributeError):  # AttributeError: no Linux
            return None
        return int(counters.read_chars + counters.write_chars)
