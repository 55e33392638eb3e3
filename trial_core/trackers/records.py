"""What a tracker is given to send."""

from __future__ import annotations

from trial_core.observe.trackers.records import *  # noqa: F403 - every record is passed on
