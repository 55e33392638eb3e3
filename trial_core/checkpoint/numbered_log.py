"""A log of numbered, create-only objects in a storage."""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeVar

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import encode_json, named_keys
from trial_core.checkpoint.storage.base import Storage
from trial_core.checkpoint.storage.parallel import read_all
from trial_core.common.decoding import decode
from trial_core.errors import CheckpointDamaged, RegistryError, TrialflowError

_RESTORE_ADVICE = "no program changes a stored entry: restore it from a backup"

Number = Annotated[int, msgspec.Meta(ge=1, le=layout.MAX_NUMBER)]


class NumberedEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of a log, counted from 1 without gaps."""

    number: Number

    @property
    def owner(self) -> str:
        """The name of the model or search that the entry belongs to."""
        raise NotImplementedError


Entry = TypeVar("Entry", bound=NumberedEntry)


class NumberedLog(Generic[Entry]):
    """An append-only log of an `owner`: the versions of a model, the moves of its aliases, or the
    records of a search. Every method may raise `StorageError`, and `error` for an entry that was
    altered.

    An append creates the object of the next number, ``{folder}/{number:06d}.json``, create-only. Of
    several writers that saw the same last number, one succeeds. `kind`, the type of the entries,
    may be a union.
    """

    def __init__(
        self,
        storage: Storage,
        owner: str,
        folder: str,
        kind: Any,
        error: type[TrialflowError] = RegistryError,
    ) -> None:
        self._storage = storage
        self._owner = owner
        self._folder = folder
        self._kind = kind
        self._error = error

    def read(self, number: int) -> Entry | None:
        key = layout.numbered_key(self._folder, number)
        url = f"{self._storage.url}/{key}"
        try:
            data = self._storage.read(key)
            if data is None:
                return None
            entry: Entry = decode(data, self._kind)
        except (msgspec.MsgspecError, CheckpointDamaged) as error:
            raise self._error(f"{url} cannot be read: {error}; {_RESTORE_ADVICE}") from error
        if entry.number != number:
            raise self._error(
                f"{url} contains number {entry.number}, expected {number}; {_RESTORE_ADVICE}"
            )
        if entry.owner != self._owner:
            raise self._error(
                f"{url} belongs to {entry.owner!r}, not {self._owner!r}: it was copied; "
                f"{_RESTORE_ADVICE}"
            )
        return entry

    def entries(self, after: int = 0) -> list[Entry]:
        """All entries with numbers above `after`, in order."""
        return read_all(self.read, [number for number in self._numbers() if number > after])

    def last(self) -> Entry | None:
        entries = (self.read(number) for number in reversed(self._numbers()))
        return next((entry for entry in entries if entry is not None), None)

    def append(self, entry: Entry) -> None:
        """Store an entry under its number, which must be the next one. Raises FileExistsError if
        another writer stored a different entry under that number.

        After an error the entry may have been stored: append it again to find out.
        """
        self._storage.create(layout.numbered_key(self._folder, entry.number), encode_json(entry))

    def _numbers(self) -> list[int]:
        named = named_keys(
            self._storage, self._folder, lambda key: layout.parse_numbered_key(self._folder, key)
        )
        return sorted(number for _, number in named)
