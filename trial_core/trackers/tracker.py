"""What a tracker of your own extends."""

from __future__ import annotations

from trial_core.observe.trackers.tracker import RecordRefused, TrackedRun, Tracker

__all__ = ["RecordRefused", "TrackedRun", "Tracker"]
