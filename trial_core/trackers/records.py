"""What a tracker is given to send."""

from __future__ import annotations

from trial_core.observe.trackers.records import (
    AnyRecord,
    Began,
    Committed,
    Deleted,
    Described,
    Metrics,
    Noted,
    Record,
    RunEnded,
)

__all__ = [
    "AnyRecord",
    "Began",
    "Committed",
    "Deleted",
    "Described",
    "Metrics",
    "Noted",
    "Record",
    "RunEnded",
]
