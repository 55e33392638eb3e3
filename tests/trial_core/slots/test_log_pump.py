"""What of a rank's log reaches the driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from trial_core.messages import LogLines
from trial_core.slots.log_pump import MAX_LINES_PER_PERIOD, LogPump


def pumped(path: Path, rank: int, text: str) -> list[str]:
    """The lines that a pump forwards of `text`, written while it runs."""
    sent: list[str] = []

    def send(message: LogLines) -> None:
        sent.extend(message.lines)

    path.write_text("from before\n")
    pump = LogPump(path, rank, send)
    with path.open("a") as log:
        log.write(text)
    pump.close()
    return sent


def test_rank_0_is_forwarded_from_where_the_pump_began(tmp_path: Path) -> None:
    """New lines, whole ones, without what a former attempt has left in the file."""
    assert pumped(tmp_path / "log", 0, "one\ntwo\n\npartial") == ["one", "two"]


@pytest.mark.parametrize("line", ["WARNING: hot", "ValueError: x", "Traceback (most recent …"])
def test_other_ranks_forward_only_what_is_alarming(tmp_path: Path, line: str) -> None:
    """Warnings and errors of every rank are shown; their chatter is not."""
    assert pumped(tmp_path / "log", 3, f"step 1\n{line}\nstep 2\n") == [line]


def test_a_flood_is_capped_and_says_so(tmp_path: Path) -> None:
    """Too many lines at once stay in the file; how many is told."""
    sent = pumped(tmp_path / "log", 0, "".join(f"{i}\n" for i in range(1000)))
    assert sent[:2] == ["0", "1"]
    left_out = 1000 - MAX_LINES_PER_PERIOD
    assert sent[MAX_LINES_PER_PERIOD] == f"… {left_out} lines are only in the log file"
    assert len(sent) == MAX_LINES_PER_PERIOD + 1


def test_what_alarms_is_forwarded_out_of_a_flood(tmp_path: Path) -> None:
    """An error among a thousand lines is not one of those left out, and keeps its place."""
    lines = [f"{i}" for i in range(1000)]
    lines[500] = "ERROR: out of paper"
    sent = pumped(tmp_path / "log", 0, "\n".join(lines) + "\n")
    assert sent[:2] == ["0", "1"]
    assert sent[MAX_LINES_PER_PERIOD - 1] == "ERROR: out of paper"
