"""Runs a command, and kills it with all its descendants when the parent ends; started by path.

    process_reaper.py PARENT_PID COMMAND…

The command runs until SIGTERM asks for its end, or the parent ends. A command that ends by itself
leaves its descendants to the reaper, as a Prefect worker that is killed leaves its runs: the reaper
prints its exit code, and starts it again when the parent writes a line to the reaper's standard
input. A parent that closes this input and a parent that dies, SIGKILL included, look the same: all
descendants are killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from types import FrameType

if __name__ == "__main__":
    # Python puts a script's folder first on sys.path, where our modules' short names could hide
    # other packages.
    sys.path.pop(0)

import psutil

POLL_SECONDS = 0.5
# How long the command has to end in good order after SIGTERM.
GRACE_SECONDS = 10.0
# From <linux/prctl.h>.
PR_SET_CHILD_SUBREAPER = 36


def run(parent_pid: int, command: list[str]) -> None:
    """Run `command`, again for each line of the parent, until SIGTERM or the parent's end."""
    adopt_orphans()
    process, is_asked, is_told = _start(command), False, False

    def terminate(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        is_asked = True
        process.terminate()

    signal.signal(signal.SIGTERM, terminate)
    while os.getppid() == parent_pid and (process.poll() is None or not is_asked):
        if process.returncode is not None and not is_told:
            is_told = True
            with contextlib.suppress(OSError):  # the parent has ended
                print(process.returncode, flush=True)
        if select.select([sys.stdin.fileno()], [], [], POLL_SECONDS)[0]:
            if not os.read(sys.stdin.fileno(), 1):
                break
            process, is_told = _start(command), False
        reap_orphans(process.pid)
    kill_descendants()
    process.wait()


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    # Standard output holds the exit codes.
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process (Linux only).

    Otherwise the runs of a worker that was killed alone would belong to init, and continue.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(own_pid: int) -> None:
    """Collect adopted children that have ended, which are zombies until then."""
    if sys.platform != "linux":
        return
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, options)) and ended.si_pid != own_pid:
            os.waitpid(ended.si_pid, 0)


def kill_descendants() -> None:
    """SIGKILL all processes below this one, including processes that start meanwhile."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=POLL_SECONDS)


if __name__ == "__main__":
    run(int(sys.argv[1]), sys.argv[2:])
