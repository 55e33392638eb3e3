"""Watching processes that a test has started."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil


def alive(pids: Iterable[int]) -> list[int]:
    """Those of `pids` that still run (a zombie does not)."""
    return [pid for pid in pids if _runs(pid)]


def wait_until_gone(pids: Iterable[int], timeout_seconds: float) -> list[int]:
    """Wait until none of `pids` runs; those that still do when time is up."""
    deadline = time.monotonic() + timeout_seconds
    left = alive(pids)
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = alive(left)
    return left


def descendants(pid: int) -> list[int]:
    """All processes that `pid` has started, and those that they have."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
