"""The process reaper between a worker and its parent."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from tests.support.processes import alive, kill, wait_until_gone
from tests.support.waiting import until
from trialflow.deployments import process_reaper

# Starts a process in a new session, as the engine of a run is, and prints its pid.
WORKER = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
print(subprocess.Popen(sleep, start_new_session=True).pid, file=sys.stderr, flush=True)
time.sleep(600)
"""
# Leaves an orphan behind that ends at once.
ORPHAN = """
import subprocess, sys, time
orphan = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'pass'])"
subprocess.run([sys.executable, "-c", orphan])
print("started", file=sys.stderr, flush=True)
time.sleep(600)
"""
GONE_SECONDS = 10.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")


@contextmanager
def reaper(
    program: str, parent_pid: int | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A reaper that runs `program`; its process, and the program's first line."""
    parent = str(parent_pid or os.getpid())
    command = [process_reaper.__file__, parent, sys.executable, "-c", program]
    with subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        try:
            yield process, process.stderr.readline()
        finally:
            process.terminate()


def test_the_runs_of_a_killed_worker_live_as_long_as_its_parent() -> None:
    """The parent learns how the worker has ended, and has it started again."""
    with reaper(WORKER) as (process, line):
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        runs = [int(line)]
        try:
            (worker,) = psutil.Process(process.pid).children()
            worker.kill()
            assert process.stdout.readline() == "-9\n"
            process.stdin.write("\n")
            process.stdin.flush()
            runs.append(int(process.stderr.readline()))
            assert alive(runs) == runs
            process.stdin.close()
            assert wait_until_gone(runs, GONE_SECONDS) == []
        finally:
            kill(runs)


def test_ended_orphans_are_reaped() -> None:
    """They do not stay as zombies for the months that a worker runs."""
    with reaper(ORPHAN) as (process, _):
        children = psutil.Process(process.pid).children
        until(lambda: len(children(recursive=True)) <= 1, "no orphan", GONE_SECONDS)


def test_a_parent_that_has_ended_is_noticed_by_its_pid() -> None:
    """Also while another process, such as a child of the parent, holds the pipe open."""
    with subprocess.Popen([sys.executable, "-c", ""]) as parent:
        parent.wait()
    with reaper(WORKER, parent.pid) as (process, line):
        try:
            process.wait(GONE_SECONDS)
            assert not line or wait_until_gone([int(line)], GONE_SECONDS) == []
        finally:
            process.kill()
