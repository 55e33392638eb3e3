"""Records of the registry, versions of a model and moves of its aliases; and the log of them."""

from __future__ import annotations

from typing import Annotated, Generic, Literal, TypeVar

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import encode_json, named_keys
from trial_core.checkpoint.storage.base import Storage
from trial_core.checkpoint.storage.parallel import read_all
from trial_core.common.decoding import decode
from trial_core.errors import CheckpointDamaged, RegistryError

_RESTORE_ADVICE = "the registry never changes a stored object: restore it from a backup"

Number = Annotated[int, msgspec.Meta(ge=1, le=layout.MAX_NUMBER)]
RecordKind = Literal["promote", "rollback"]
Alias = Literal["champion", "previous"]


class Numbered(msgspec.Struct, frozen=True, kw_only=True):
    """A numbered record of a model, counted from 1 without gaps."""

    number: Number
    model: str


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


Entry = TypeVar("Entry", bound=Numbered)


class NumberedLog(Generic[Entry]):
    """An append-only log: the versions of a model, or the moves of its aliases. Every method may
    raise `StorageError`.

    Numbers start at 1. An append creates the object of the next number, create-only::

        {folder}/{number:06d}.json

    Of several writers that saw the same last number, one succeeds.
    """

    def __init__(self, storage: Storage, model: str, folder: str, kind: type[Entry]) -> None:
        self._storage = storage
        self._model = model
        self._folder = folder
        self._kind = kind

    def read(self, number: int) -> Entry | None:
        """The entry with that number, or None. Raises RegistryError if it is not a valid entry."""
        key = layout.numbered_key(self._folder, number)
        url = f"{self._storage.url}/{key}"
        try:
            data = self._storage.read(key)
            if data is None:
                return None
            entry = decode(data, self._kind)
        except (msgspec.MsgspecError, CheckpointDamaged) as error:
            raise RegistryError(f"{url} cannot be read: {error}; {_RESTORE_ADVICE}") from error
        if entry.number != number:
            raise RegistryError(
                f"{url} contains number {entry.number}, expected {number}; {_RESTORE_ADVICE}"
            )
        if entry.model != self._model:
            raise RegistryError(
                f"{url} belongs to model {entry.model!r}: it was copied; {_RESTORE_ADVICE}"
            )
        return entry

    def entries(self, after: int = 0) -> list[Entry]:
        """All entries with numbers above `after`, in order."""
        return read_all(self.read, [number for number in self._numbers() if number > after])

    def last(self) -> Entry | None:
        """The entry with the highest number, or None if the log is empty."""
        entries = (self.read(number) for number in reversed(self._numbers()))
        return next((entry for entry in entries if entry is not None), None)

    def append(self, entry: Entry) -> None:
        """Store an entry under its number, which must be the next one.

        After an error the entry may have been stored: append it again to find out.

        Raises:
            FileExistsError: another writer stored a different entry under that number.
        """
        self._storage.create(layout.numbered_key(self._folder, entry.number), encode_json(entry))

    def _numbers(self) -> list[int]:
        named = named_keys(
            self._storage, self._folder, lambda key: layout.parse_numbered_key(self._folder, key)
        )
        return sorted(number for _, number in named)
