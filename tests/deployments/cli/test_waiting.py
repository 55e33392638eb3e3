"""What a command waits for is shown: on a terminal a line that is redrawn, else a plain line."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.cli import TRIALFLOW, environment_in
from tests.support.waiting import until
from trialflow.deployments.cli import console, waiting as waiting_module
from trialflow.deployments.cli.main import main
from trialflow.deployments.cli.waiting import Waiting, waiting, waiting_at_end

ERASED = re.compile(r"\x1b\[2K")


class Terminal:
    """A pseudo terminal of 100 columns.

    Attributes:
        side: the descriptor that a process writes to.
        shown: everything that was written to it.
    """

    def __init__(self) -> None:
        self._ours, self.side = pty.openpty()
        self.shown = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # nothing writes to it any longer
            while data := os.read(self._ours, 65536):
                self.shown += data.decode(errors="replace")

    def close(self) -> None:
        os.close(self.side)
        self._reader.join()
        os.close(self._ours)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    with closing(Terminal()) as found:
        yield found


@contextmanager
def slow_migration(folder: Path, terminal: Terminal) -> Iterator[subprocess.Popen[bytes]]:
    """`trialflow migrate` of a folder with a file whose content `let_it_read` gives."""
    process = subprocess.Popen(
        [*TRIALFLOW, "migrate", "."], cwd=folder, stderr=terminal.side,
        env=environment_in(folder, {"TERM": "xterm-256color", "COLUMNS": "100"}),
        stdout=subprocess.PIPE, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """A folder with a file whose content `let_it_read` gives."""
    os.mkfifo(tmp_path / "slow.py")
    return tmp_path


def let_it_read(folder: Path) -> None:
    with (folder / "slow.py").open("w") as pipe:  # waits until the command reads it
        (folder / "quick").write_text("x = 1\n")
        (folder / "quick").replace(folder / "slow.py")  # for its second look
        pipe.write("x = 1\n")


def test_a_slow_command_shows_its_wait(slow: Path, terminal: Terminal) -> None:
    """Redrawn on a terminal, and gone at the end."""
    with slow_migration(slow, terminal) as shown:
        until(lambda: terminal.shown.count("reading slow.py") > 3, "it is redrawn", 30)
        let_it_read(slow)
        assert shown.communicate(timeout=60) == (b"", None)
        assert shown.returncode == 0
    *_, last = ERASED.split(terminal.shown)
    assert "reading" not in last
    assert "changed 0 files; 0 lines to look at" in last


def test_a_slow_command_without_a_terminal(
    slow: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It prints one line. stdout has the result."""
    monkeypatch.chdir(slow)
    monkeypatch.setattr(waiting_module, "SHOWN_AFTER_SECONDS", 0.1)
    said: list[str] = []
    with ThreadPoolExecutor(1) as thread:
        migrated = thread.submit(main, ["migrate", "."])
        until(lambda: said.append(capfd.readouterr().err) or any(said), "the line")
        let_it_read(slow)
        assert migrated.result() == 0
    assert "".join(said) == "reading slow.py…\n"
    assert capfd.readouterr() == ("", "changed 0 files; 0 lines to look at\n")


def test_a_quick_command_shows_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Not within the first two seconds."""
    with waiting("reading") as wait:
        pass
    wait.show()  # the timer is late
    assert capfd.readouterr() == ("", "")


def test_a_warning_is_not_mixed_with_the_line(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line makes room for it, and is drawn again below."""
    monkeypatch.setattr(waiting_module, "SHOWN_AFTER_SECONDS", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    with os.fdopen(os.dup(terminal.side), "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with waiting("reading s3://bucket"):
            until(lambda: "reading s3://bucket" in terminal.shown, "the line")
            console.warning("the disk is nearly full")
            until(
                lambda: "reading s3://bucket" in terminal.shown.partition("nearly full")[2],
                "the line, again",
            )
    [before] = re.findall(r"([^\r\n]*)warning: the disk is nearly full\r\n", terminal.shown)
    assert "reading" not in ERASED.split(before)[-1]


def test_bytes_are_shown_as_a_bar() -> None:
    """As far as they are known."""
    wait = Waiting("verifying 4f0c")
    wait.bytes_read(3 * 2**20, 12 * 2**20)
    drawn = Console(file=io.StringIO(), width=100, color_system=None)
    with drawn.capture() as capture:
        drawn.print(wait.render())
    assert re.search(r"verifying 4f0c ━+╸ +3.0 MiB of 12.0 MiB 0:00", capture.get())


def test_a_wait_within_another_shows_nothing_of_its_own(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two lines that are redrawn would destroy each other."""
    monkeypatch.setattr(waiting_module, "SHOWN_AFTER_SECONDS", 0.0)
    before = {*threading.enumerate()}
    with waiting("reading all"), waiting("reading one"):
        for timer in {*threading.enumerate()} - before:
            timer.join()
    assert capfd.readouterr().err == "reading all…\n"


def test_what_the_end_of_a_command_waits_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is shown as other waits are, after the command's own work."""
    monkeypatch.setattr(waiting_module, "SHOWN_AFTER_SECONDS", 0.0)
    shown: list[str] = []

    @contextmanager
    def ends_slowly() -> Iterator[int]:
        yield 7
        until(lambda: shown.append(capsys.readouterr().err) or shown[-1], "the text")

    with waiting_at_end(ends_slowly(), "runs save") as entered:
        assert entered == 7
    assert "runs save" in shown[-1]
