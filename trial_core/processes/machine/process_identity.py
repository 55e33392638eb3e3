"""Which process wrote a stored object, and whether it still lives on this machine.

A process number means nothing on another machine or in another container. Several may have the same
host name (``localhost``, a container's fixed name). So the identity also has the machine's boot and
the namespace of process numbers, where the system has them.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import psutil

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PROCESS_NUMBERS = Path("/proc/self/ns/pid")

# The clock may be set between two readings of a process's start.
_SAME_START_SECONDS = 60.0
_IDENTITY = re.compile(r"[0-9]{1,18}@[0-9]{1,18}")


def this_process() -> str:
    """Identify this process on its machine, even after its number was used again.

    ``{pid}@{start}/{boot id}/{namespace}``, or ``{pid}@{start}`` on a system without the latter.
    """
    process = f"{os.getpid()}@{psutil.Process().create_time():.0f}"
    place = _this_place()
    return f"{process}/{place}" if place else process


def is_local(process: str) -> bool:
    """True if a process's number, in its `this_process`, has a meaning here.

    False if it was written elsewhere, or before this machine was restarted. Identities without a
    place count as local.
    """
    place = process.partition("/")[2]
    return not place or place == _this_place()


def is_alive(process: str) -> bool:
    """True if a process of this machine, by its `this_process`, lives; True if unknown."""
    own, _, _ = process.partition("/")
    if not _IDENTITY.fullmatch(own) or not is_local(process):
        return True
    pid, _, start = own.partition("@")
    try:
        seen = psutil.Process(int(pid)).create_time()
    except psutil.NoSuchProcess:
        return False
    except (psutil.AccessDenied, OverflowError):
        return True
    return abs(seen - float(start)) < _SAME_START_SECONDS


def _this_place() -> str:
    """This machine's boot and its namespace of process numbers; empty if not known."""
    with contextlib.suppress(OSError):  # not Linux
        return f"{_BOOT_ID.read_text().strip()}/{_PROCESS_NUMBERS.stat().st_ino}"
    return ""
