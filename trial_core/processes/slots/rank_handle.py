"""A rank's process and its log, as the driver sees them, on any machine."""

from __future__ import annotations

import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path

TAIL_LINES = 20
TAIL_BYTES = 16384


class RankHandle(ABC):
    """The process of one rank.

    Attributes:
        host: the name of its machine.
        pid: the id of its process, and so of its session, on its machine; None until it was forked.
        log_path: its log, on this machine.

    Args:
        on_exit: called with rank and return code when the process and all its children have ended,
            in the thread that learns of it; not for a rank that the run has not started.
    """

    is_launched = True
    """True if the run has started it. Then it ends with the run, which will know its return code,
    and its log is the run's. False if another program has started it; then it leaves by itself."""

    def __init__(
        self,
        rank: int,
        host: str,
        log_path: Path,
        on_exit: Callable[[int, int], None] = lambda rank, code: None,
    ) -> None:
        self.rank = rank
        self.host = host
        self.pid: int | None = None
        self.log_path = log_path
        self._on_exit = on_exit
        self._ended = threading.Event()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until the rank and its children have ended. Return whether they have."""
        return self._ended.wait(timeout_seconds)

    def ended(self, code: int) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self._on_exit(self.rank, code)

    def kill(self) -> None:
        """SIGKILL the rank and its children (data loader workers, compilers)."""
        self.signal(signal.SIGKILL)

    @abstractmethod
    def signal(self, number: int) -> None:
        """Send the rank a signal, if it still runs."""

    @abstractmethod
    def written_bytes(self) -> int:
        """A number that grows when the rank writes to a disk, or it or a child to its log."""

    def log_size(self) -> int:
        """The size of the rank's log in bytes; 0 if it was deleted."""
        try:
            return self.log_path.stat().st_size
        except OSError:
            return 0

    def log_from(self, start: int) -> str:
        """The rank's log from byte `start`; empty if it was deleted."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(start)
                return log.read().decode(errors="replace")
        except OSError:
            return ""

    def log_tail(self) -> str:
        end = self.log_from(max(0, self.log_size() - TAIL_BYTES))
        return "\n".join(end.splitlines()[-TAIL_LINES:])


def wait_for_end(ranks: Iterable[RankHandle], timeout_seconds: float) -> list[RankHandle]:
    """Wait until the ranks and their children have ended. Return the ranks that still run."""
    deadline = time.monotonic() + timeout_seconds
    return [rank for rank in ranks if not rank.wait(max(0.0, deadline - time.monotonic()))]
