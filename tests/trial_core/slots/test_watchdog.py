"""The watchdog's own process, without ranks. With ranks: test_slot_group.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.processes import wait_until_gone
from trial_core.slots.watchdog import PROGRAM
from trial_core.slots.watchdog_main import PID_BYTES, kill_sessions

DEADLINE_SECONDS = 20


@pytest.fixture
def two_groups() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes, each in its own session."""
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


COMPILING = """
import signal, subprocess, sys
wait = [sys.executable, "-c", "import signal; signal.pause()"]
print(subprocess.Popen(wait, process_group=0).pid, flush=True)
signal.pause()
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Popen has no process_group")
def test_children_in_groups_of_their_own_are_killed() -> None:
    """As compilers that ninja has started."""
    command = [sys.executable, "-c", COMPILING]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        compiler = int(rank.stdout.readline())
        kill_sessions({rank.pid})
        assert wait_until_gone([compiler], DEADLINE_SECONDS) == []
    assert rank.returncode == -signal.SIGKILL
