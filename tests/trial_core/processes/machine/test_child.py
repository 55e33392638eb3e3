"""A child process: orders, answers, and its end."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.processes import wait_until_gone
from trial_core.processes.machine.child import Child, log_tail

ECHO = "import sys\nfor line in sys.stdin: print(line.strip()[::-1], flush=True)\nsys.exit(3)"
DEAF = """
import subprocess, time
print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
time.sleep(600)
"""


def test_a_child_answers_until_its_input_ends() -> None:
    """Then its exit code is known."""
    child = Child(["-c", ECHO], answers=True)
    child.tell(b"stressed\n")
    assert child.output.readline() == b"desserts\n"
    assert child.lives()
    assert child.exit_code is None
    assert child.end(60)
    assert child.exit_code == 3


def test_a_child_that_does_not_end_is_killed_with_all_that_it_has_started() -> None:
    child = Child(["-c", DEAF], answers=True)
    grandchild = int(child.output.readline())
    assert not child.end(0.0)
    assert wait_until_gone([child.pid, grandchild], 60) == []


def test_waking_a_child_never_blocks() -> None:
    """Neither if its pipe is full, nor after its end."""
    child = Child(["-c", DEAF], answers=True)
    for _ in range(100):
        child.wake(b"x" * 2**14)
    child.kill()
    child.wake(b"x")
    assert not child.lives()


def test_a_child_ends_although_its_parent_ignores_the_ends_of_children() -> None:
    """As a user's script may do. The exit code is lost."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        child = Child(["-c", "pass"])
        assert child.wait(60)
        assert child.end(0.0)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert child.exit_code == 0


def test_only_its_parent_kills_a_child_and_never_one_that_is_reaped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The id of a reaped one may be another process's; a forked process unwinds through blocks."""
    killed: list[int] = []
    child = Child(["-c", ECHO], answers=True)
    with monkeypatch.context() as patched:
        patched.setattr(os, "killpg", lambda group, number: killed.append(group))
        patched.setattr(os, "getpid", lambda: child.pid)
        child.kill(reap_seconds=0.0)
    assert killed == []
    child.end(60)
    monkeypatch.setattr(os, "killpg", lambda group, number: killed.append(group))
    child.kill()
    assert killed == []


def test_the_end_of_a_log_names_the_file(tmp_path: Path) -> None:
    """With its last bytes, or alone if it is empty."""
    path = tmp_path / "log"
    with path.open("wb") as log:
        Child(["-c", "print('x' * 5000, 'the end')"], log=log).end(60)
    assert log_tail(path).startswith(f"its log {path} ends with:\nx")
    assert log_tail(path).endswith(" the end")
    path.write_bytes(b"")
    assert log_tail(path) == f"its log: {path}"


def test_a_program_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(OSError, match="/no/such/python"):
        Child(["-c", "pass"])
