"""The process that keeps a worker, and all that it starts, to its parent."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.support.processes import wait_until_gone
from trialflow.deployments import process_reaper

# Starts a process in a session of its own, as the engine of a run is, and says which.
WORKER = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
print(subprocess.Popen(sleep, start_new_session=True).pid, flush=True)
time.sleep(600)
"""
GONE_SECONDS = 10.0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere orphans are adopted by init alone")
def test_runs_of_a_worker_that_was_killed_are_killed() -> None:
    """The worker alone (out of memory): its runs would be nobody's, and go on."""
    command = [
        sys.executable,
        process_reaper.__file__,
        str(os.getpid()),
        sys.executable,
        "-c",
        WORKER,
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        run = int(process.stdout.readline())
        try:
            (worker,) = psutil.Process(process.pid).children()
            worker.kill()
            process.wait(GONE_SECONDS)
            assert wait_until_gone([run], GONE_SECONDS) == []
        finally:
            process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.kill(run, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere orphans are adopted by init alone")
def test_adopted_orphans_that_have_ended_are_buried() -> None:
    """A worker lives for months: what loses its parent below it must not stay as a zombie."""
    orphan = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'pass'])"
    script = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {orphan!r}])"
    command = [sys.executable, process_reaper.__file__, str(os.getpid()), sys.executable, "-c"]
    with subprocess.Popen(
        [*command, f"{script}; print('started', flush=True); time.sleep(600)"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        try:
            deadline = time.monotonic() + GONE_SECONDS
            while len(psutil.Process(process.pid).children(recursive=True)) > 1:
                assert time.monotonic() < deadline, "the orphan is still there"
                time.sleep(0.1)
        finally:
            process.terminate()
