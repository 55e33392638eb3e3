"""Forwards a rank's log to the driver: rank 0's lines, other ranks' warnings, at a limited rate.

The log is a plain file, the rank's stdout and stderr, so nothing is lost when the rank dies. The
pump reads it, and reports how many lines it has not forwarded.
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
CHUNK_BYTES = 2**20
WARNING_PATTERN = re.compile(r"WARNING|ERROR|CRITICAL|Warning|Error|Traceback")


class LogPump:
    """Reads new lines of the log in a background thread and sends them."""

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
        """Send the remaining lines, then stop."""
        self._stopping.set()
        self._thread.join(timeout=5)
        self._file.close()

    def _run(self) -> None:
        while not self._stopping.wait(PERIOD_SECONDS):
            self._forward()
        self._forward()

    def _forward(self) -> None:
        selected = _SelectedLines()
        while data := self._file.read(CHUNK_BYTES):
            # A progress bar ends its lines with a carriage return.
            text = (self._partial + self._decode(data)).replace("\r", "\n")
            *lines, partial = text.split("\n")
            self._partial = partial[-MAX_LINE_CHARACTERS:]
            for line in lines:
                is_warning = WARNING_PATTERN.search(line) is not None
                if line.strip() and (self._rank == 0 or is_warning):
                    selected.offer(line[:MAX_LINE_CHARACTERS], is_warning)
        if lines := selected.lines():
            self._send(LogLines(lines=lines))


class _SelectedLines:
    """The lines of one period that are forwarded: warnings first, then the earliest others."""

    def __init__(self) -> None:
        self._count = 0
        self._warnings: list[tuple[int, str]] = []
        self._others: list[tuple[int, str]] = []

    def offer(self, line: str, is_warning: bool) -> None:
        kept = self._warnings if is_warning else self._others
        if len(kept) < MAX_LINES_PER_PERIOD:
            kept.append((self._count, line))
        self._count += 1

    def lines(self) -> list[str]:
        """In order; a last line says how many were omitted."""
        room = MAX_LINES_PER_PERIOD - len(self._warnings)
        lines = [line for _, line in sorted(self._warnings + self._others[:room])]
        if omitted := self._count - len(lines):
            lines.append(f"… {omitted} lines are only in the log file")
        return lines
