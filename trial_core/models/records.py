"""What the registry stores: versions of a model, and the moves of its aliases. Plain data."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from trial_core.checkpoint import layout

Number = Annotated[int, msgspec.Meta(ge=1)]
Kind = Literal["promote", "rollback"]
Alias = Literal["champion", "previous"]


class Numbered(msgspec.Struct, frozen=True, kw_only=True):
    """What has a number among others of its model's.

    Attributes:
        number: counted from 1, without gaps.
        model: which model it belongs to.
    """

    number: Number
    model: str


class Version(Numbered, frozen=True, kw_only=True):
    """A checkpoint under a number of its model's. Never changed once it is stored.

    Attributes:
        checkpoint: the checkpoint's uuid.
        trial: which trial has saved that.
        experiment: of which experiment.
        batches_trained: after how many batches.
        metric: the validation metric by which versions are compared; None: by none.
        smaller_is_better: which way it improves.
        value: of that metric, when it was registered; None: there was no finite number.
        at: when it was registered: ISO 8601, UTC.
        by: who registered it: ``user@host``.
        run: id of the run that did; empty: a person.
        note: for people to read.
    """

    checkpoint: str
    trial: str
    experiment: str
    batches_trained: int
    metric: str | None
    smaller_is_better: bool
    value: float | None
    at: str
    by: str
    run: str = ""
    note: str = ""

    def __str__(self) -> str:
        return f"version {self.number} of model {self.model}"

    @property
    def manifest_key(self) -> str:
        """The key of the checkpoint's manifest: the checkpoint is there as long as that is."""
        return layout.manifest_key(self.trial, self.batches_trained, self.checkpoint)


class Move(Numbered, frozen=True, kw_only=True):
    """A change of a model's aliases: all of them as they are after it. The last one holds.

    Attributes:
        kind: what was asked for.
        champion: number of the version that is the champion.
        previous: number of the version that was it before; None: none was.
        at: when: ISO 8601, UTC.
        by: who moved them: ``user@host``.
        run: id of the run that did; empty: a person.
        why: for people to read.
        unique: tells this move from another of the same number that came too late.
    """

    kind: Kind
    champion: Number
    previous: Number | None
    at: str
    by: str
    run: str = ""
    why: str = ""
    unique: str = ""

    def __str__(self) -> str:
        """Who did what, when and why, as the rest of a sentence."""
        did = "promoted" if self.kind == "promote" else "rolled back to"
        instead = "" if self.previous is None else f" instead of version {self.previous}"
        run = f", in run {self.run}" if self.run else ""
        why = f": {self.why}" if self.why else ""
        return f"{self.by} {did} version {self.champion}{instead} at {self.at}{run}{why}"

    def alias_of(self, number: int) -> Alias | None:
        """What a version is called after this move."""
        if number == self.champion:
            return "champion"
        return "previous" if number == self.previous else None
