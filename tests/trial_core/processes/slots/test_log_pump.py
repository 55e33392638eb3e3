"""Which lines of a rank's log are forwarded to the driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from trial_core.messages import LogLines
from trial_core.processes.slots.log_pump import MAX_LINES_PER_PERIOD, LogPump


def forwarded(path: Path, rank: int, text: str) -> list[str]:
    """The forwarded lines of `text`, which is written while the pump runs."""
    sent: list[str] = []

    def send(message: LogLines) -> None:
        sent.extend(message.lines)

    path.write_text("from before\n")
    pump = LogPump(path, rank, send)
    with path.open("a") as log:
        log.write(text)
    pump.close()
    return sent


def test_new_lines_of_rank_0_are_forwarded(tmp_path: Path) -> None:
    """Only complete lines, and none that an earlier attempt has written."""
    assert forwarded(tmp_path / "log", 0, "one\ntwo\n\npartial") == ["one", "two"]


@pytest.mark.parametrize("line", ["WARNING: hot", "ValueError: x", "Traceback (most recent …"])
def test_only_warnings_of_other_ranks_are_forwarded(tmp_path: Path, line: str) -> None:
    """Warnings and errors, but no other lines."""
    assert forwarded(tmp_path / "log", 3, f"step 1\n{line}\nstep 2\n") == [line]


def test_too_many_lines_are_counted_instead(tmp_path: Path) -> None:
    """The last forwarded line says how many are only in the file."""
    sent = forwarded(tmp_path / "log", 0, "".join(f"{i}\n" for i in range(1000)))
    assert sent[:2] == ["0", "1"]
    omitted = 1000 - MAX_LINES_PER_PERIOD
    assert sent[MAX_LINES_PER_PERIOD] == f"… {omitted} lines are only in the log file"
    assert len(sent) == MAX_LINES_PER_PERIOD + 1


def test_a_warning_is_forwarded_although_there_are_too_many_lines(tmp_path: Path) -> None:
    """One error among a thousand lines is forwarded, in its order."""
    lines = [f"{i}" for i in range(1000)]
    lines[500] = "ERROR: out of paper"
    sent = forwarded(tmp_path / "log", 0, "\n".join(lines) + "\n")
    assert sent[:2] == ["0", "1"]
    assert sent[MAX_LINES_PER_PERIOD - 1] == "ERROR: out of paper"
