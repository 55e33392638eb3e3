"""The watchdog's own process, without ranks. With ranks: test_slot_group.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from trial_core.slots.watchdog import PROGRAM
from trial_core.slots.watchdog_main import PID_BYTES

DEADLINE_SECONDS = 20


@pytest.fixture
def two_groups() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes, each in its own group."""
    sleep = [sys.executable, "-c", "import signal; signal.pause()"]
    started = [subprocess.Popen(sleep, start_new_session=True) for _ in range(2)]
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_only_ranks_that_have_not_ended_are_killed(
    two_groups: list[subprocess.Popen[bytes]],
) -> None:
    """Another process may have the id of a rank that has ended."""
    ended, running = two_groups
    program = [sys.executable, "-I", "-S", str(PROGRAM), str(os.getpid())]
    with subprocess.Popen(program, stdin=subprocess.PIPE) as watchdog:
        assert watchdog.stdin is not None
        for pid in (ended.pid, running.pid, -ended.pid):
            watchdog.stdin.write(pid.to_bytes(PID_BYTES, "big", signed=True))
    assert watchdog.returncode == 0
    assert running.wait(DEADLINE_SECONDS) == -signal.SIGKILL
    assert ended.poll() is None
