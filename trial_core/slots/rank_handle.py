"""A rank's process and its log, as the driver sees them, on whatever machine it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class RankHandle(Protocol):
    """The process of one rank."""

    rank: int
    is_launched: bool
    """Whether the run has started it: then it ends with the run, its return code will be known, and
    its log is the run's. Another program has started it otherwise, and it leaves by itself."""
    host: str
    """The name of its machine."""
    pid: int | None
    """Its process id on its machine, and that of its session; None until it was forked."""
    log_path: Path
    """Its log on this machine."""

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until the rank and its children have ended. Return whether they have."""

    def kill(self) -> None:
        """SIGKILL the rank and its children (data loader workers, compilers)."""

    def signal(self, number: int) -> None:
        """Send the rank a signal, if it still runs."""

    def written_bytes(self) -> int:
        """Grows when the rank writes to a disk, or when it or a child writes to its log."""

    def log_size(self) -> int:
        """The size of the rank's log in bytes."""

    def log_from(self, start: int) -> str:
        """The rank's log from byte `start`."""

    def log_tail(self) -> str:
        """The last lines of the rank's log."""


class RankLog:
    """The log of a rank.

    Args:
        path: where it is on this machine.
    """

    is_launched = True

    def __init__(self, path: Path) -> None:
        self.log_path = path

    def log_size(self) -> int:
        """The size of the rank's log in bytes."""
        return self.log_path.stat().st_size

    def log_from(self, start: int) -> str:
        """The rank's log from byte `start`."""
        with self.log_path.open("rb") as log:
            log.seek(start)
            return log.read().decode(errors="replace")

    def log_tail(self, lines: int = 20, limit_bytes: int = 16384) -> str:
        """The last lines of the rank's log."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, self.log_path.stat().st_size - limit_bytes))
                text = log.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])
