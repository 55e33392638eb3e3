"""Numbered objects to which one more is added at a time: a model's versions, and its moves.

They are counted from 1, and whoever adds one creates the next number, which nobody else may have::

    {folder}/{number:06d}.json

So of several who have seen the same last one, one succeeds. Where the storage cannot tell two
writers apart, they take turns; see `lock`.
"""

from __future__ import annotations

import logging
from typing import Generic, TypeVar

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.json_objects import encode_json
from trial_core.checkpoint.manifest import is_json
from trial_core.errors import RegistryError
from trial_core.models.records import Numbered
from trial_core.models.storage_lock import locked
from trial_core.storage.base import Storage
from trial_core.storage.parallel import StopSignal, in_parallel

_READ_THREADS = 8

_logger = logging.getLogger(__name__)


Entry = TypeVar("Entry", bound=Numbered)


class NumberedLog(Generic[Entry]):
    """The numbered objects of a folder. Every method may raise `StorageError`.

    Args:
        folder: where they are.
        locks: the folder of the lock, where one is needed.
        kind: what they are.
    """

    def __init__(self, storage: Storage, folder: str, locks: str, kind: type[Entry]) -> None:
        self._storage = storage
        self._folder = folder
        self._locks = locks
        self._kind = kind

    def read(self, number: int) -> Entry | None:
        """The entry of that number, None where there is none.

        Raises:
            RegistryError: there is something else.
        """
        key = layout.numbered_key(self._folder, number)
        data = self._storage.read(key)
        if data is None:
            return None
        where = f"{self._storage.url}/{key}"
        if not is_json(data):
            # On some storages a write can be seen while it is under way, or its author has died.
            _logger.warning("%s is half an object, and counts for nothing", where)
            return None
        try:
            entry = msgspec.json.decode(data, type=self._kind)
        except msgspec.MsgspecError as error:
            raise RegistryError(f"{where} cannot be read: {error}; {_ALTERED}") from error
        if entry.number != number:
            raise RegistryError(f"{where} says that its number is {entry.number}; {_ALTERED}")
        return entry

    def entries(self, after: int = 0) -> list[Entry]:
        """All entries of higher numbers, in order."""

        def read(number: int, stop: StopSignal) -> Entry | None:
            stop.check()
            return self.read(number)

        numbers = [number for number in self._numbers() if number > after]
        return [each for each in in_parallel(read, numbers, _READ_THREADS) if each is not None]

    def last(self) -> Entry | None:
        """The entry of the highest number, None where there is none at all."""
        entries = (self.read(number) for number in reversed(self._numbers()))
        return next((entry for entry in entries if entry is not None), None)

    def append(self, entry: Entry) -> None:
        """Store an entry under its number, which must be that after the last one.

        After an error it may yet have been stored: append the same again to find out.

        Raises:
            FileExistsError: somebody else has stored another one there.
        """
        key, data = layout.numbered_key(self._folder, entry.number), encode_json(entry)
        if self._storage.has_conditional_writes():
            self._storage.create(key, data)
            return
        with locked(self._storage, self._locks) as lock:
            existing = self._storage.read(key)
            if existing == data:
                return
            if existing is not None and is_json(existing):
                raise FileExistsError(f"{key} exists in {self._storage.url}")
            lock.check()
            if existing is not None:  # whoever began to write it has the lock no more
                self._storage.remove(key)
            self._storage.create(key, data)

    def _numbers(self) -> list[int]:
        numbers = (
            layout.parse_numbered_key(self._folder, key)
            for key in self._storage.sizes(self._folder)
        )
        return sorted(number for number in numbers if number is not None)


_ALTERED = "the registry writes its objects once: restore it from a copy of the storage"
