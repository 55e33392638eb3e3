"""Starts and ends the sender."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from trial_core.common import text_format
from trial_core.observe.trackers.journal import SENDER_LOG
from trial_core.observe.trackers.sender import END, SenderOrder

POLL_SECONDS = 0.02
REAP_SECONDS = 1.0


class SenderProcess:
    """The sender, as the driver sees it. Its trackers' output is in ``logs/trackers.log``.

    Args:
        variables: environment variables in addition to this process's.
        hear: called in a thread with news for people.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self, order: SenderOrder, variables: Mapping[str, str], hear: Callable[[str], None]
    ) -> None:
        path = Path(order.run_dir) / SENDER_LOG
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trial_core.observe.trackers.sender"],
                env={**os.environ, **variables}, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        self._write(msgspec.json.encode(order) + b"\n")
        if self._process.stdin is not None:
            os.set_blocking(self._process.stdin.fileno(), False)
        self._listener = threading.Thread(target=self._listen, args=(hear,), daemon=True)
        self._listener.start()

    def wake(self) -> bool:
        """Tell it that there are new records. Return whether it lives."""
        self._write(b"\n")
        return self._lives()

    def end(self, wait: Callable[[Callable[[float], bool]], bool]) -> None:
        """Tell it that no more records come, and wait for its end; then kill it.

        Its child processes end, too.

        Args:
            wait: waits for its end, like `Ending.wait`.
        """
        if self._process.stdin is not None:
            self._write(END)
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        wait(self._has_ended)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in a read of a lost disk
            self._process.wait(REAP_SECONDS)
        self._listener.join(1.0)

    def _has_ended(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._lives():
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def _lives(self) -> bool:
        # Not `Popen.poll`: the id must be its own until `os.killpg`.
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, options) is None

    def _write(self, data: bytes) -> None:
        # A full pipe holds wakes enough; a sender that has died cannot be woken.
        if self._process.stdin is not None:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self._process.stdin.fileno(), data)

    def _listen(self, hear: Callable[[str], None]) -> None:
        if self._process.stdout is not None:
            for line in self._process.stdout:
                hear(text_format.clean(line.decode(errors="replace").strip()))
