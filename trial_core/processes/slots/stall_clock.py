"""Measures how long ranks have made no progress. `slot_group` compares it with the timeout.

The timeouts: `config/sections.py`.

While ranks train or validate, progress is the end of a batch. Other requests (build, fetch,
restore, save, hooks) have no batches; there, progress is any write to a rank's log or to a disk,
which includes downloads. Writes do not count while batches are due: a hung rank may still log
warnings.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from trial_core.messages import AnyRequest, RunValidation, TrainBatches
from trial_core.processes.slots.rank_handle import RankHandle

CHECKS_PER_TIMEOUT = 10
"""How often to check for writes within one stall timeout."""


class StallClock:
    """The time of a slot group's last progress. Thread-safe."""

    def __init__(self, ranks: Sequence[RankHandle]) -> None:
        self._ranks = ranks
        self._last_batch = self._last_write = time.monotonic()
        self._written: list[int] = []

    def note_progress(self) -> None:
        """Note that a batch has ended or a request was sent."""
        self._last_batch = time.monotonic()

    def seconds_without_progress(self, request: AnyRequest) -> float:
        if has_batches(request):
            return time.monotonic() - self._last_batch
        written = [rank.written_bytes() for rank in self._ranks]
        if written != self._written:
            self._written, self._last_write = written, time.monotonic()
        return time.monotonic() - max(self._last_batch, self._last_write)

    def next_check_seconds(self, request: AnyRequest, stall_seconds: float) -> float:
        left = max(0.0, stall_seconds - self.seconds_without_progress(request))
        return left if has_batches(request) else min(left, stall_seconds / CHECKS_PER_TIMEOUT)


def has_batches(request: AnyRequest) -> bool:
    """True if the ranks report batches while they carry out `request`."""
    return isinstance(request, (TrainBatches, RunValidation))
