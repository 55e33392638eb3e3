"""The process that keeps a command, and all that it starts, to its parent; started by path.

    keeper.py PARENT_PID COMMAND…

It runs the command until that ends, SIGTERM asks it to, or the parent goes. The parent holds the
other end of the keeper's standard input and never writes to it, so asking for the end and dying,
SIGKILL included, look the same from here: everything below is then killed as it is; so it is when
the command has been killed. A worker of Prefect's does none of this: killed, it leaves the runs
that it has started behind.
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
    # Started by path, Python puts this file's folder first on sys.path, where our modules' short
    # names could hide other packages.
    sys.path.pop(0)

import psutil

POLL_SECONDS = 0.5
# From SIGTERM on, for what the command does in good order.
GRACE_SECONDS = 10.0
# From <linux/prctl.h>.
PR_SET_CHILD_SUBREAPER = 36


def keep(parent_pid: int, command: list[str]) -> int:
    """Run `command` for as long as the parent wants it; the exit code."""
    adopt_orphans()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def end(number: int, frame: FrameType | None) -> None:
        process.terminate()

    signal.signal(signal.SIGTERM, end)
    while process.poll() is None and os.getppid() == parent_pid:
        if select.select([sys.stdin.fileno()], [], [], POLL_SECONDS)[0]:
            break
        bury_orphans(process.pid)
    kill_all_below()
    return process.wait()


def adopt_orphans() -> None:
    """Have what loses its parent below this process become its child; on Linux alone.

    Otherwise the runs of a worker that was killed by itself would be nobody's, and go on.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def bury_orphans(own_pid: int) -> None:
    """Take note of the end of adopted children, which stay as zombies until then."""
    if sys.platform != "linux":
        return
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, look)) and ended.si_pid != own_pid:
            os.waitpid(ended.si_pid, 0)


def kill_all_below() -> None:
    """SIGKILL all processes below this one, those that start meanwhile included."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(keep(int(sys.argv[1]), sys.argv[2:]))
