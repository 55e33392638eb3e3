"""An append-only log of numbered objects: the versions of a model, and the moves of its aliases.

Numbers start at 1. An append creates the object of the next number, create-only::

    {folder}/{number:06d}.json

Of several writers that saw the same last number, one succeeds.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import encode_json, named_keys
from trial_core.checkpoint.storage.base import Storage
from trial_core.checkpoint.storage.parallel import read_all
from trial_core.common.decoding import decode
from trial_core.errors import CheckpointDamaged, RegistryError
from trial_core.models.records import Numbered

_RESTORE_ADVICE = "the registry never changes a stored object: restore it from a backup"

Entry = TypeVar("Entry", bound=Numbered)


class NumberedLog(Generic[Entry]):
    """The numbered objects of a model in a folder. Every method may raise `StorageError`."""

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
        except (msgspec.MsgspecError, RecursionError, CheckpointDamaged) as error:
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
        key = layout.numbered_key(self._folder, entry.number)
        self._storage.create(key, encode_json(entry))

    def _numbers(self) -> list[int]:
        named = named_keys(
            self._storage, self._folder, lambda key: layout.parse_numbered_key(self._folder, key)
        )
        return sorted(number for _, number in named)
