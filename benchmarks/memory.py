"""Samples the memory of processes in a thread, and keeps the maximum."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

SAMPLE_SECONDS = 0.01


class Resident(NamedTuple):
    """Resident memory in bytes: own, and mapped files, whose pages the kernel can drop."""

    own: int
    mapped: int


class PeakMemory:
    """Measures the most memory within the block.

    Args:
        read: returns the present memory.

    Attributes:
        before: the memory when the block began.
        own, mapped: the most of each.
    """

    def __init__(self, read: Callable[[], Resident]) -> None:
        self._read = read
        self.before = Resident(0, 0)
        self.own = self.mapped = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> PeakMemory:
        self.before = self._read()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            now = self._read()
            self.own, self.mapped = max(self.own, now.own), max(self.mapped, now.mapped)


def resident_bytes(pids: Iterable[int | str] = ("self",)) -> Resident:
    """Return the processes' resident memory; each has its share of common pages."""
    own = mapped = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        except OSError:  # the process has ended
            continue
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        own += (kib["Pss_Anon"] + kib["Pss_Shmem"]) * 1024
        mapped += kib["Pss_File"] * 1024
    return Resident(own, mapped)


def own_resident_bytes() -> Resident:
    """Return this process's resident memory, with whole pages that others have too.

    Unlike `resident_bytes` it does not walk the process's memory, which would slow the process.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith("Rss")}
    return Resident((kib["RssAnon"] + kib["RssShmem"]) * 1024, kib["RssFile"] * 1024)
