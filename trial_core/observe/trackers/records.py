"""The records of a trial's journal: one line of JSON each."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

Batches = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Record(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """An event of a trial's run.

    Attributes:
        at: Unix time in seconds.
    """

    at: float


class Described(Record, frozen=True, kw_only=True):
    """The trial's description: again after each launch, which may have other ranks.

    Attributes:
        parameters: hyperparameters by their names, and other settings as ``trialflow.*``.
        tags: the trial, its code, the versions of libraries, how the ranks divide the work.
    """

    parameters: dict[str, str | int | float | bool | None]
    tags: dict[str, str]


class Began(Record, frozen=True, kw_only=True):
    """Training begins, or continues from a checkpoint; later points are trained again.

    Attributes:
        batches: trained before.
        attempt: the number of the trial's run.
    """

    batches: int
    attempt: int


class Metrics(Record, frozen=True, kw_only=True):
    """Numbers after `batches` batches.

    Attributes:
        samples: trained by then on all ranks; 0 if unknown.
        attempt: the number of the trial's run.
        values: by names such as ``validation/loss``; None if not finite.
    """

    batches: Batches
    samples: int
    attempt: int
    values: dict[str, float | None]

    @property
    def numbers(self) -> dict[str, float]:
        """The values, with NaN in place of None."""
        return {name: math.nan if value is None else value for name, value in self.values.items()}


class Committed(Record, frozen=True, kw_only=True):
    """A checkpoint is committed.

    Attributes:
        url: the place of its files.
        digest: of its manifest.
    """

    batches: Batches
    uuid: str
    url: str
    size_bytes: int
    digest: str


class Deleted(Record, frozen=True, kw_only=True):
    """A checkpoint was deleted by the retention policy."""

    uuid: str


class Noted(Record, frozen=True, kw_only=True):
    """A fact for people: a restart, a stall, another placement of the ranks."""

    batches: int
    text: str


class RunEnded(Record, frozen=True, kw_only=True):
    """A run of the trial has ended.

    Attributes:
        outcome: ``completed``, ``stopped`` or ``failed``.
        why: for people.
    """

    outcome: str
    why: str


AnyRecord = Described | Began | Metrics | Committed | Deleted | Noted | RunEnded
