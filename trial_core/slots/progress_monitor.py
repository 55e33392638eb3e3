"""Signs that ranks get on. Where there is none for too long, they hang.

Training and validating give one with every batch. All else that ranks do (build, fetch, restore,
save, call the trial's hooks) has no batches. There it is a sign that a rank writes: a line to its
log, or anything to a disk, as whoever downloads or fetches does. While batches are due that is
none: ranks that hang may well go on to complain about it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from trial_core.messages import AnyRequest, RunValidation, TrainBatches

# How often to look whether ranks write, in a stall timeout's length.
LOOKS = 10


class MonitoredRank(Protocol):
    """A rank's process, as the driver holds it."""

    def written_bytes(self) -> int: ...


class ProgressMonitor:
    """When the ranks of a group have last given a sign. For any thread.

    Args:
        ranks: the group's own, as they grow.
    """

    def __init__(self, ranks: Sequence[MonitoredRank]) -> None:
        self._ranks = ranks
        self._batch_at = self._write_at = time.monotonic()
        self._written: list[int] = []

    def note(self) -> None:
        """A batch has ended, or the ranks have been asked for something."""
        self._batch_at = time.monotonic()

    def silence_seconds(self, request: AnyRequest) -> float:
        """How long there has been none, while the ranks carry out `request`."""
        if has_batches(request):
            return time.monotonic() - self._batch_at
        written = [rank.written_bytes() for rank in self._ranks]
        if written != self._written:
            self._written, self._write_at = written, time.monotonic()
        return time.monotonic() - max(self._batch_at, self._write_at)

    def look_again_seconds(self, request: AnyRequest, stall_seconds: float) -> float:
        """How long to wait before asking anew whether there has been none for `stall_seconds`."""
        left = max(0.0, stall_seconds - self.silence_seconds(request))
        return left if has_batches(request) else min(left, stall_seconds / LOOKS)


def has_batches(request: AnyRequest) -> bool:
    """Whether what the ranks do for `request` is made of batches."""
    return isinstance(request, (TrainBatches, RunValidation))
