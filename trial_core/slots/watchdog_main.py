"""Kills the ranks when their driver ends; started by path, so that it starts fast and stays small.

    watchdog_main.py DRIVER_PID

The driver holds the other end of standard input, and writes the process id of each rank to it:
positive when the rank has started, negative when it has ended. A rank cannot always notice its
driver's end by itself: it may be stopped, or in native code that holds the interpreter lock.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys

PID_BYTES = 4
# How often to ask whether the driver is still the parent: a process that the driver has forked
# holds the other end of standard input, too.
POLL_SECONDS = 1.0


def run(driver: int) -> None:
    """Wait for the driver's end, then SIGKILL the ranks that still run, with their children."""
    # A machine that shuts down signals all processes; the driver then has the ranks save.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ranks: set[int] = set()
    while True:
        if select.select([0], [], [], POLL_SECONDS)[0]:
            pid = int.from_bytes(os.read(0, PID_BYTES), "big", signed=True)
            if pid == 0:  # the end of the input
                break
            (ranks.add if pid > 0 else ranks.discard)(abs(pid))
        elif os.getppid() != driver:
            break
    kill_sessions(ranks)


def kill_sessions(ranks: set[int]) -> None:
    """SIGKILL ranks, each of which leads a session, and all processes of their sessions.

    Not their process groups alone: ninja gives each compiler a separate group. Does not wait for
    the end of a process, except that one may start another one meanwhile.
    """
    for rank in ranks:
        with contextlib.suppress(OSError):
            os.killpg(rank, signal.SIGKILL)
    killed: set[int] = set()
    while members := _live_members(ranks) - killed:
        for pid in members:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        killed |= members


def _live_members(leaders: set[int]) -> set[int]:
    """The processes of these sessions that have not ended; none where there is no /proc."""
    found = set()
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{int(name)}/stat", "rb") as file:
                # 4242 (name) S parent group session …
                state, _, _, session = file.read().rpartition(b")")[2].split()[:4]
            if int(session) in leaders and state not in (b"Z", b"X"):
                found.add(int(name))
    return found


if __name__ == "__main__":
    run(int(sys.argv[1]))
