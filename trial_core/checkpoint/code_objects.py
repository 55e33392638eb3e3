"""Code archives: the code of trials, stored once by content, and named by manifests.

::

    code/{sha256}/{number:06d}.tar              a copy of the archive
    code/{sha256}/{number:06d}-{unique}.json    a prune looks whether it may delete that copy

An upload and a prune may meet. The upload first writes its intent, which names a copy, then looks
for markers of that copy; if there is one, it names another copy. The prune first writes its marker,
then looks for intents and manifests that name the copy. So at least one of them sees the other. No
one waits, and no clock decides: a marker is removed only by the prune that wrote it, so a copy that
a prune may still delete is never named again. That of a killed prune stays, and costs a number.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from typing import NamedTuple

from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import StoredCode
from trial_core.errors import CheckpointDamaged, CommitConflict
from trial_core.storage.base import Storage

_TRIES = 20


class StoredCopies(NamedTuple):
    """What the storage has of one archive.

    Attributes:
        sizes: the size of each copy in bytes, by its number.
        being_deleted: the numbers of copies that a prune may delete at any time.
    """

    sizes: dict[int, int]
    being_deleted: frozenset[int]


class RunCode:
    """The code of a run's trial, and the stored copy that its uploads name.

    Attributes:
        data: the archive.
        digest: ``sha256:…`` of it.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self._number: int | None = None
        self._last: tuple[str, StoredCode] | None = None

    def store(
        self, storage: Storage, uuid: str, announce: Callable[[StoredCode], None]
    ) -> StoredCode:
        """Store the archive, unless it is there; return the copy that a checkpoint shall name.

        A repeated call for one checkpoint returns the same copy: its manifest may be stored.

        Args:
            announce: writes the checkpoint's intent, which names the copy.

        Raises:
            CommitConflict: prunes keep deleting each copy.
        """
        if self._last is not None and self._last[0] == uuid:
            announce(self._last[1])
            return self._last[1]
        for _ in range(_TRIES):
            if self._number is None:
                self._number = _unmarked_number(stored_copies(storage, self.digest))
            code = StoredCode(digest=self.digest, size_bytes=len(self.data), number=self._number)
            announce(code)
            copies = stored_copies(storage, self.digest)  # after the intent: see above
            if code.number in copies.being_deleted:
                self._number = None
                continue
            if copies.sizes.get(code.number) != code.size_bytes:
                storage.write(code.key, self.data)
            self._last = uuid, code
            return code
        raise CommitConflict(
            f"checkpoint {uuid} is not uploaded: prunes began to delete its code, "
            f"{storage.url}/{layout.code_folder(self.digest)}, {_TRIES} times; find out what keeps "
            "pruning this storage"
        )


def stored_copies(storage: Storage, digest: str) -> StoredCopies:
    """What the storage has of an archive. One request."""
    sizes: dict[int, int] = {}
    being_deleted: set[int] = set()
    for key, size_bytes in storage.sizes(layout.code_folder(digest)).items():
        name = layout.parse_code_key(key)
        if name is not None and name.is_marker:
            being_deleted.add(name.number)
        elif name is not None:
            sizes[name.number] = size_bytes
    return StoredCopies(sizes, frozenset(being_deleted))


def read_code(storage: Storage, code: StoredCode, uuid: str) -> bytes:
    """The code archive that checkpoint `uuid` names, compared with its digest.

    Raises:
        CheckpointDamaged: it is missing, or differs.
    """
    data = storage.read(code.key)
    where = f"{storage.url}/{code.key}, the code of checkpoint {uuid},"
    if data is None:
        raise CheckpointDamaged(
            f"{where} is missing; if the checkpoint has not just been pruned, put back the file, "
            "or use the original code folder"
        )
    check_code(data, code, where)
    return data


def check_code(data: bytes, code: StoredCode, where: str) -> None:
    """Compare an archive with its digest.

    Args:
        where: the archive's name in the error.

    Raises:
        CheckpointDamaged: they differ.
    """
    seen = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if seen != code.digest:
        raise CheckpointDamaged(
            f"{where} is damaged: its digest is {seen}, expected {code.digest}; put back the file, "
            "or use the original code folder"
        )


def _unmarked_number(copies: StoredCopies) -> int:
    """The number of a copy that no prune may delete: one that is stored, else the first free."""
    taken = copies.being_deleted
    if stored := copies.sizes.keys() - taken:
        return min(stored)
    return next(number for number in itertools.count() if number not in taken)
