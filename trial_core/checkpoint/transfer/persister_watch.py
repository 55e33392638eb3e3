"""Detects a hung persister: no bytes moved within the stall timeout.

The process itself is not asked, because it may be stopped or inside a system call that never
returns. The kernel counts the bytes that it reads and writes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import psutil

_logger = logging.getLogger(__name__)

PROGRESS_LOG_SECONDS = 300.0
"""How often to log the progress of a long transfer. The rank itself logs nothing meanwhile, and its
driver would count it as hung."""

MIN_PROGRESS_BYTES = 2**20
"""Fewer bytes do not count: logs and event loops write as well. A smaller file counts when the
process reports it as stored."""

POLLS_PER_TIMEOUT = 10

_MAX_POLL_SECONDS = 5.0


class StallWatch:
    """A context manager that watches a process while it works.

    Args:
        timeout_seconds: the stall timeout; None for no limit.
        on_stall: called once, on the watch's thread, when the timeout is over.
    """

    def __init__(
        self, pid: int, timeout_seconds: float | None, on_stall: Callable[[], None]
    ) -> None:
        self.has_stalled = False
        self._pid = pid
        self._timeout_seconds = timeout_seconds
        self._on_stall = on_stall
        self._reports = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall-watch", daemon=True)

    def __enter__(self) -> StallWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def stall_message(self) -> str | None:
        """The text that follows "the process": that it stalled. None if it has not."""
        if not self.has_stalled:
            return None
        return (
            f"has moved nothing for {self._timeout_seconds:g} s "
            "(checkpointing.stall_timeout_seconds) and was killed: check why the storage, or a "
            "disk of this machine, does not answer"
        )

    def note_report(self) -> None:
        self._reports += 1

    def _watch(self) -> None:
        timeout = self._timeout_seconds
        poll_seconds = (
            _MAX_POLL_SECONDS
            if timeout is None
            else min(_MAX_POLL_SECONDS, timeout / POLLS_PER_TIMEOUT)
        )
        # Count polls, not seconds: both processes may have been stopped for a while.
        idle_polls, seen = 0, (self._reports, self._moved_bytes() or 0)
        logged_at = time.monotonic()
        while not self._is_over.wait(poll_seconds):
            reports, moved_bytes = self._reports, self._moved_bytes()
            if moved_bytes is None:
                continue  # not counted on this system, or the process has ended
            if reports == seen[0] and moved_bytes < seen[1] + MIN_PROGRESS_BYTES:
                idle_polls += 1
                if timeout is not None and idle_polls * poll_seconds >= timeout:
                    self.has_stalled = True
                    self._on_stall()
                    return
                continue
            idle_polls, seen = 0, (reports, moved_bytes)
            if time.monotonic() >= logged_at + PROGRESS_LOG_SECONDS:
                logged_at = time.monotonic()
                _logger.info(
                    "a checkpoint transfer is still running: the persister has read and written "
                    "%.1f GiB so far", moved_bytes / 2**30,
                )  # fmt: skip

    def _moved_bytes(self) -> int | None:
        """The bytes that the process has read and written so far; None if unknown."""
        try:
            counters = psutil.Process(self._pid).io_counters()
        except (psutil.Error, AttributeError):  # AttributeError: not on Linux
            return None
        return int(counters.read_chars + counters.write_chars)
