"""Records of the registry: versions of a model, and moves of its aliases."""

from __future__ import annotations

from typing import Literal

from trial_core.checkpoint import layout
from trial_core.checkpoint.numbered_log import Number, NumberedEntry

RecordKind = Literal["promote", "rollback"]
Alias = Literal["champion", "previous"]


class Numbered(NumberedEntry, frozen=True, kw_only=True):
    """A numbered record of a model, counted from 1 without gaps."""

    model: str

    @property
    def owner(self) -> str:
        return self.model


class Version(Numbered, frozen=True, kw_only=True):
    """A checkpoint registered under a model. Never changed once stored.

    Attributes:
        checkpoint: its uuid.
        metric: the validation metric that versions are compared by; None if they are not compared.
        value: the metric at registration; None if it had no finite number.
        at: time of registration: ISO 8601, UTC.
        by: who registered it: ``user@host``.
        run: id of the run that registered it; empty if a person did.
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
        """The key of the checkpoint's manifest. The checkpoint exists while this object does."""
        return layout.manifest_key(self.trial, self.batches_trained, self.checkpoint)


class Move(Numbered, frozen=True, kw_only=True):
    """A change of a model's aliases. Holds all aliases after it; the move with the highest number
    applies.

    Attributes:
        champion, previous: numbers of versions: the champion's, and that of the one before it.
        at, by, run: of the move; as in `Version`.
        unique: distinguishes this move from a losing one with the same number.
    """

    kind: RecordKind
    champion: Number
    previous: Number | None
    at: str
    by: str
    run: str = ""
    why: str = ""
    unique: str = ""

    def __str__(self) -> str:
        did = "promoted" if self.kind == "promote" else "rolled back to"
        instead = "" if self.previous is None else f" instead of version {self.previous}"
        run = f", in run {self.run}" if self.run else ""
        why = f": {self.why}" if self.why else ""
        return f"{self.by} {did} version {self.champion}{instead} at {self.at}{run}{why}"

    def alias_of(self, number: int) -> Alias | None:
        if number == self.champion:
            return "champion"
        return "previous" if number == self.previous else None
