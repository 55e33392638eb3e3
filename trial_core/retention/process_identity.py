"""Which process wrote a stored object, and whether it still lives on this machine."""

from __future__ import annotations

import os
import re

import psutil

# The clock may be set between two readings of a process's start.
_SAME_START_SECONDS = 60.0
_IDENTITY = re.compile(r"[0-9]{1,18}@[0-9]{1,18}")


def this_process() -> str:
    """This process on its machine, also after its number was used again: ``{pid}@{start}``."""
    return f"{os.getpid()}@{psutil.Process().create_time():.0f}"


def is_alive(process: str) -> bool:
    """Whether a process of this machine lives, by its `this_process`. True if nothing tells."""
    pid, _, start = process.partition("@")
    if not _IDENTITY.fullmatch(process):
        return True
    try:
        seen = psutil.Process(int(pid)).create_time()
    except psutil.NoSuchProcess:
        return False
    except (psutil.AccessDenied, OverflowError):
        return True
    return abs(seen - float(start)) < _SAME_START_SECONDS
