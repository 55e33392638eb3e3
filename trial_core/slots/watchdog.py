"""The driver's handle on the watchdog: the process that kills the ranks if the driver ends."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from trial_core.errors import LaunchError
from trial_core.slots.watchdog_main import PID_BYTES

PROGRAM = Path(__file__).with_name("watchdog_main.py")


class Watchdog:
    """Kills the watched ranks and their children when this process has ended, also by SIGKILL.

    Raises:
        LaunchError: the process cannot be started.
    """

    def __init__(self) -> None:
        try:
            self._process = subprocess.Popen(
                # Without site-packages: it needs none, and they take time and memory.
                [sys.executable, "-I", "-S", str(PROGRAM), str(os.getpid())],
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise LaunchError(f"cannot start the watchdog of the ranks: {error}") from error

    def watch(self, rank_pid: int) -> None:
        """Watch a rank's process group from now on."""
        self._tell(rank_pid)

    def forget(self, rank_pid: int) -> None:
        """Forget a rank that has ended. Called before another process can get its id."""
        self._tell(-rank_pid)

    def close(self) -> None:
        """End the watchdog. Kills no rank."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _tell(self, pid: int) -> None:
        # The pipe is broken if something has killed the watchdog: the ranks continue without it.
        # It is closed if a rank ends only after `close`.
        with contextlib.suppress(BrokenPipeError, ValueError):
            if self._process.stdin is not None:
                self._process.stdin.write(pid.to_bytes(PID_BYTES, "big", signed=True))
