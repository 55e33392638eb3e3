"""Forwards a rank's log to the driver: rank 0's lines, the others' warnings, at a capped rate.

The log is a plain file that the rank writes as its stdout and stderr, so that nothing is lost when
it dies. The pump reads behind. What it leaves out stays in the file, and it says how much that is.
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
# A flood is read, and counted, piece by piece.
CHUNK_BYTES = 2**20
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
        shown = _Shown()
        while data := self._file.read(CHUNK_BYTES):
            # A progress bar ends its lines with a carriage return.
            text = (self._partial + self._decode(data)).replace("\r", "\n")
            *lines, partial = text.split("\n")
            self._partial = partial[-MAX_LINE_CHARACTERS:]
            for line in lines:
                is_alarming = ALARMING.search(line) is not None
                if line.strip() and (self._rank == 0 or is_alarming):
                    shown.offer(line[:MAX_LINE_CHARACTERS], is_alarming)
        if lines := shown.lines():
            self._send(LogLines(lines=lines))


class _Shown:
    """The lines of one period that are sent on: the first ones, and before them the alarming."""

    def __init__(self) -> None:
        self._count = 0
        self._alarming: list[tuple[int, str]] = []
        self._others: list[tuple[int, str]] = []

    def offer(self, line: str, is_alarming: bool) -> None:
        kept = self._alarming if is_alarming else self._others
        if len(kept) < MAX_LINES_PER_PERIOD:
            kept.append((self._count, line))
        self._count += 1

    def lines(self) -> list[str]:
        """In their order; how many were left out comes last."""
        room = MAX_LINES_PER_PERIOD - len(self._alarming)
        lines = [line for _, line in sorted(self._alarming + self._others[:room])]
        if left_out := self._count - len(lines):
            lines.append(f"… {left_out} lines are only in the log file")
        return lines
