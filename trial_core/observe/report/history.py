"""A report's memory of a trial over all its runs, in bounded size.

It is stored as JSON next to the report, here and in the storage. A run that resumes from a
checkpoint reads it, and drops everything later than that checkpoint, which is trained again.
Manifests are not enough: they know only saved batches, and are deleted with old checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from trial_core.checkpoint.manifest import utc_now
from trial_core.common import text_format

MAX_POINTS = 400
MAX_METRICS = 24
MAX_CHECKPOINTS = 50
MAX_EVENTS = 30

Curve = Literal["training", "validation", "speed", "learning_rate", "machine"]


class Point(msgspec.Struct, frozen=True, array_like=True):
    """Values after `batches` batches."""

    batches: int
    values: dict[str, float]


class SavedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A committed checkpoint, as the report lists it."""

    uuid: str
    batches: int
    total_bytes: int
    # The searcher metric, if this state was validated before the commit.
    metric: float | None = None
    blocked_seconds: float | None = None  # how long training waited for the snapshot
    upload_seconds: float | None = None  # from the start of the upload to the commit


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A restart, a resume or a warning after `batches` batches; `at` is ISO 8601, UTC."""

    at: str
    batches: int
    what: str


class ReportHistory(msgspec.Struct, kw_only=True):
    """A trial's curves, checkpoints and restarts."""

    written_at: str = ""  # when it was last stored
    ended: str = ""  # how the last run ended; empty while it runs, and if it was killed
    links: dict[str, str] = {}  # pages of that run elsewhere, by their names
    curves: dict[Curve, list[Point]] = {}  # in the order of batches
    checkpoints: list[SavedCheckpoint] = []  # oldest first; of many only the newest and the best
    unlisted: int = 0  # checkpoints that exist, too
    deleted: int = 0  # checkpoints that the retention policy has deleted
    events: list[Event] = []  # oldest first
    forgotten_events: int = 0  # earlier ones, which are left out

    def add_point(self, curve: Curve, batches: int, values: Mapping[str, Any]) -> None:
        """Add the finite numbers among `values`; thin the curve where points are densest."""
        drawable = {k: float(v) for k, v in values.items() if text_format.is_finite_number(v)}
        points = self.curves.setdefault(curve, [])
        while points and points[-1].batches >= batches:
            points.pop()
        points.append(Point(batches, dict(list(drawable.items())[:MAX_METRICS])))
        if len(points) > MAX_POINTS:
            gaps = [b.batches - a.batches for a, b in zip(points, points[2:], strict=False)]
            # The point whose neighbours are closest to each other; never an end.
            del points[1 + gaps.index(min(gaps))]

    def add_checkpoint(self, saved: SavedCheckpoint, smaller_is_better: bool) -> None:
        self.checkpoints.append(saved)
        if len(self.checkpoints) > MAX_CHECKPOINTS:
            best = self.best(smaller_is_better)
            self.checkpoints.remove(next(each for each in self.checkpoints if each is not best))
            self.unlisted += 1

    def drop_checkpoint(self, uuid: str) -> None:
        left = [saved for saved in self.checkpoints if saved.uuid != uuid]
        if len(left) == len(self.checkpoints):
            self.unlisted = max(0, self.unlisted - 1)
        self.checkpoints = left
        self.deleted += 1

    def best(self, smaller_is_better: bool) -> SavedCheckpoint | None:
        """The listed checkpoint with the best searcher metric; of equal ones, the first."""
        sign = 1 if smaller_is_better else -1
        judged = [(sign * m, each) for each in self.checkpoints if (m := each.metric) is not None]
        return min(judged, key=lambda pair: pair[0])[1] if judged else None

    def add_event(self, batches: int, what: str) -> None:
        """Add an event that happens now."""
        self.events.append(Event(at=utc_now(), batches=batches, what=text_format.one_line(what)))
        if len(self.events) > MAX_EVENTS:
            del self.events[0]
            self.forgotten_events += 1

    def go_back_to(self, batches: int) -> None:
        """Drop everything after the checkpoint at `batches`, from which the trial resumes."""
        self.checkpoints = [each for each in self.checkpoints if each.batches <= batches]
        for kind, points in self.curves.items():
            self.curves[kind] = [point for point in points if point.batches <= batches]

    def to_json(self) -> bytes:
        """The stored form, with `written_at` set to now."""
        self.written_at = utc_now()
        return msgspec.json.encode(self)
