"""Forwards a rank's log to the driver: rank 0's lines, the others' warnings, at a capped rate.

The log is a plain file that the rank writes as its stdout and stderr, so that nothing is lost when
it dies. The pump reads behind. What it leaves out stays in the file.
"""

from __future__ import annotations

import codecs
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

from trial_core.messages import LogLines

PERIOD_SECONDS = 0.5
MAX_LINES_PER_PERIOD = 10
MAX_LINE_CHARACTERS = 2000
ALARMING = re.compile(r"WARNING|ERROR|CRITICAL|Warning|Error|Traceback")


class LogPump:
    """Reads new lines of the log in a background thread and sends them on."""

    def __init__(self, path: Path, rank: int, send: Callable[[LogLines], None]) -> None:
        self._rank = rank
        self._send = send
        self._file = path.open("rb")
        self._file.seek(0, os.SEEK_END)
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._partial = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-pump", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send what is left, then stop."""
        self._stopping.set()
        self._thread.join(timeout=5)
        self._file.close()

    def _run(self) -> None:
        while not self._stopping.wait(PERIOD_SECONDS):
            self._forward()
        self._forward()

    def _forward(self) -> None:
        text = self._partial + self._decode(self._file.read())
        # A progress bar ends its lines with a carriage return.
        *lines, partial = text.replace("\r", "\n").split("\n")
        self._partial = partial[-MAX_LINE_CHARACTERS:]
        wanted = [line[:MAX_LINE_CHARACTERS] for line in lines if self._is_wanted(line)]
        left_out = len(wanted) - MAX_LINES_PER_PERIOD
        if left_out > 0:
            wanted = wanted[:MAX_LINES_PER_PERIOD]
            wanted.append(f"… {left_out} lines are only in the log file")
        if wanted:
            self._send(LogLines(lines=wanted))

    def _is_wanted(self, line: str) -> bool:
        return bool(line.strip()) and (self._rank == 0 or ALARMING.search(line) is not None)
