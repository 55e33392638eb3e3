"""What a report remembers of a trial over all its runs. Bounded, however long they are.

It lies as JSON beside the report, and goes to the storage with it. A run that goes on from a
checkpoint reads it, and forgets what came after that checkpoint: it will be trained again.
Manifests would not do: they know only the batches that were saved, and go with old checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from trial_core import text_format
from trial_core.checkpoint.manifest import utc_now

MAX_POINTS = 400
MAX_METRICS = 24
MAX_CHECKPOINTS = 50
MAX_EVENTS = 30

Curve = Literal["training", "validation", "speed"]


class Point(msgspec.Struct, frozen=True, array_like=True):
    """Numbers as of `batches` trained."""

    batches: int
    values: dict[str, float]


class SavedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A committed checkpoint, as the report lists it.

    Attributes:
        metric: the searcher's, if this very state was validated before it was committed.
        blocked_seconds: how long training stood still for it.
        upload_seconds: from the beginning of the upload to the commit.
    """

    uuid: str
    batches: int
    total_bytes: int
    metric: float | None = None
    blocked_seconds: float | None = None
    upload_seconds: float | None = None


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that does not happen in every run: a restart, a resume.

    Attributes:
        at: ISO 8601, UTC.
        batches: trained by then.
    """

    at: str
    batches: int
    what: str


class ReportHistory(msgspec.Struct, kw_only=True):
    """A trial's curves, checkpoints and restarts.

    Attributes:
        written_at: when it was last written down.
        ended: how the last run of it has ended; empty while it goes on, and if it was killed.
        curves: points by kind, each in the order of batches.
        checkpoints: those that are there, oldest first; of very many the newest, and the best.
        unlisted, deleted: how many more there are, and how many the experiment's rules deleted.
        events: oldest first; `forgotten_events` came before them.
    """

    written_at: str = ""
    ended: str = ""
    curves: dict[Curve, list[Point]] = msgspec.field(
        default_factory=lambda: {"training": [], "validation": [], "speed": []}
    )
    checkpoints: list[SavedCheckpoint] = []
    unlisted: int = 0
    deleted: int = 0
    events: list[Event] = []
    forgotten_events: int = 0

    def add_point(self, curve: Curve, batches: int, values: Mapping[str, Any]) -> None:
        """Note the numbers among `values`; of too many points the least missed one goes."""
        drawable = {name: float(v) for name, v in values.items() if _is_drawable(v)}
        points = self.curves[curve]
        while points and points[-1].batches >= batches:
            points.pop()
        points.append(Point(batches, dict(list(drawable.items())[:MAX_METRICS])))
        if len(points) > MAX_POINTS:
            del points[_least_missed(points)]

    def add_checkpoint(self, saved: SavedCheckpoint, smaller_is_better: bool) -> None:
        """Note a checkpoint that was just committed."""
        self.checkpoints.append(saved)
        if len(self.checkpoints) > MAX_CHECKPOINTS:
            best = self.best(smaller_is_better)
            self.checkpoints.remove(next(each for each in self.checkpoints if each is not best))
            self.unlisted += 1

    def drop_checkpoint(self, uuid: str) -> None:
        """Note that a checkpoint was deleted."""
        left = [saved for saved in self.checkpoints if saved.uuid != uuid]
        if len(left) == len(self.checkpoints):
            self.unlisted = max(0, self.unlisted - 1)
        self.checkpoints = left
        self.deleted += 1

    def best(self, smaller_is_better: bool) -> SavedCheckpoint | None:
        """The listed checkpoint with the best searcher metric; of equals the first."""
        sign = 1 if smaller_is_better else -1
        judged = [(sign * m, each) for each in self.checkpoints if (m := each.metric) is not None]
        return min(judged, key=lambda pair: pair[0])[1] if judged else None

    def add_event(self, batches: int, what: str) -> None:
        """Note that something has happened, now."""
        self.events.append(Event(at=utc_now(), batches=batches, what=text_format.one_line(what)))
        if len(self.events) > MAX_EVENTS:
            del self.events[0]
            self.forgotten_events += 1

    def go_back_to(self, batches: int) -> None:
        """The trial goes on from a checkpoint of `batches`: forget what came after it."""
        self.checkpoints = [each for each in self.checkpoints if each.batches <= batches]
        for kind, points in self.curves.items():
            self.curves[kind] = [point for point in points if point.batches <= batches]

    def to_json(self) -> bytes:
        """The story as it is stored; `written_at` is now."""
        self.written_at = utc_now()
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> ReportHistory:
        """Read what `to_json` gave.

        Raises:
            msgspec.MsgspecError: it is something else.
        """
        return msgspec.json.decode(data, type=cls)


def _is_drawable(value: Any) -> bool:
    return text_format.is_number(value) and math.isfinite(value)


def _least_missed(points: list[Point]) -> int:
    """The index of the point whose neighbours are closest to each other; neither end's."""
    gaps = [
        after.batches - before.batches for before, after in zip(points, points[2:], strict=False)
    ]
    return 1 + min(range(len(gaps)), key=gaps.__getitem__)
