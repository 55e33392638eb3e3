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
    """Wait for the driver's end, then SIGKILL the process groups of the ranks that still run."""
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
    for rank in ranks:
        with contextlib.suppress(OSError):
            os.killpg(rank, signal.SIGKILL)


if __name__ == "__main__":
    run(int(sys.argv[1]))
