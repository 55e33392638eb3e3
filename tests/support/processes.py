"""Checks whether processes still run."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from ipaddress import ip_address

import psutil


def alive(pids: Iterable[int]) -> list[int]:
    """The `pids` that still run; a zombie does not."""
    return [pid for pid in pids if _runs(pid)]


def wait_until_gone(pids: Iterable[int], timeout_seconds: float) -> list[int]:
    """Wait until none of `pids` runs; returns those that still do at the deadline."""
    deadline = time.monotonic() + timeout_seconds
    left = []
    for pid in alive(pids):
        with contextlib.suppress(psutil.NoSuchProcess):
            left.append(psutil.Process(pid))
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        # Not another process that has got the same number since.
        left = [each for each in left if each.is_running() and _runs(each.pid)]
    return [each.pid for each in left]


def descendants(pid: int) -> list[int]:
    """All children of `pid`, and their children."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill(pids: Iterable[int], number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to those of `pids` that still run."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def listening_beyond_loopback(pids: Iterable[int]) -> list[str]:
    """The addresses at which `pids` listen and that other machines can reach."""
    return [
        f"process {pid} at {socket.laddr.ip}:{socket.laddr.port}"
        for pid in pids
        for socket in psutil.Process(pid).net_connections("inet")
        if socket.status == psutil.CONN_LISTEN and not ip_address(socket.laddr.ip).is_loopback
    ]


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
