"""Reads stored files in parallel ranges and verifies their size and digest, in bounded memory.

Several threads read ranges of several files, or of one, each into a buffer of the storage's pool.
A range is written to its place at once, and hashed after all earlier ranges. So the digest covers
the bytes in order, and each byte is read once.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Lock
from typing import NoReturn

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import FileEntry
from trial_core.checkpoint.storage import buffer_pool
from trial_core.checkpoint.storage.base import RangeRead, Storage
from trial_core.checkpoint.storage.local_files import PartFile
from trial_core.checkpoint.storage.parallel import CancelSignal, in_parallel
from trial_core.errors import CheckpointDamaged, StorageError

_logger = logging.getLogger(__name__)

READ_THREADS = buffer_pool.POOL_BUFFERS
"""Ranges read at once, each in one buffer of the storage's pool."""


OnRead = Callable[[int, int], None]
"""Called with the bytes that are read so far, and with all bytes to read. Must return at once."""


def unheard(done: int, total: int) -> None:
    """An `OnRead` that does nothing."""


@dataclass(frozen=True)
class Damage:
    """How a stored file differs from its manifest entry: it is missing (`seen_bytes` is None), its
    size differs (`seen_digest` is None), its digest differs, or it changed while it was read."""

    entry: FileEntry
    seen_bytes: int | None
    seen_digest: str | None = None
    was_overwritten: bool = False

    def __str__(self) -> str:
        expected = self.entry
        owner = str(expected.stored_at).partition("/")[0]
        stored = f"stored by checkpoint {owner}" if owner else f"written by rank {expected.rank}"
        file = f"{expected.path}, {stored},"
        if self.was_overwritten:
            return f"{file} was overwritten while it was read (expected {expected.digest})"
        if self.seen_bytes is None:
            return f"{file} is missing (expected {expected.size_bytes} bytes, {expected.digest})"
        if self.seen_digest is None:
            return f"{file} has {self.seen_bytes} bytes, expected {expected.size_bytes}"
        return f"{file} has digest {self.seen_digest}, expected {expected.digest}"


def find_damage(
    storage: Storage, uuid: str, entries: Iterable[FileEntry], on_read: OnRead = unheard
) -> list[Damage]:
    """Read every byte of a checkpoint's files; return the files that differ from their entries."""
    wanted = list(entries)
    found = wrong_sizes(storage, uuid, wanted)
    missing = {damage.entry.path for damage in found}
    files = [StoredFile(entry, entry.key(uuid)) for entry in wanted if entry.path not in missing]
    read_files(storage, files, found.append, on_read)
    note_damage(storage, uuid, found)
    damaged = {damage.entry.path for damage in found}
    _forget_damage(storage, uuid, [each for each in wanted if each.path not in damaged])
    place = {entry.path: index for index, entry in enumerate(wanted)}
    return sorted(found, key=lambda damage: place[damage.entry.path])


def read_verified(storage: Storage, uuid: str, entry: FileEntry) -> bytes | Damage:
    """The content of a small file of a checkpoint. Raises CheckpointDamaged if it is large."""
    seen, seen_bytes = "", 0
    for _ in range(2):  # as `read_files`
        content = storage.read(entry.key(uuid))
        if content is None:
            return Damage(entry, None)
        seen, seen_bytes = f"sha256:{hashlib.sha256(content).hexdigest()}", len(content)
        if seen == entry.digest:
            return content
    return Damage(entry, seen_bytes, seen if seen_bytes == entry.size_bytes else None)


def wrong_sizes(storage: Storage, uuid: str, entries: Iterable[FileEntry]) -> list[Damage]:
    """The files that are missing or have another size. Lists each folder that has some once."""
    wanted = list(entries)
    sizes: dict[str, int] = {}
    for owner in dict.fromkeys(entry.place(uuid)[0] for entry in wanted):
        sizes.update(storage.sizes(layout.files_folder(owner)))
    return [
        Damage(entry, seen_bytes)
        for entry in wanted
        if (seen_bytes := sizes.get(entry.key(uuid))) != entry.size_bytes
    ]


def note_damage(storage: Storage, uuid: str, damage: Iterable[Damage]) -> None:
    """Note which files have other bytes, so that no later checkpoint refers to them. A missing
    file, or one of another size, is found without a note. Only warns if the storage fails: it may
    be read-only."""
    for each in damage:
        if each.seen_digest is None:
            continue
        try:
            # Not what was seen: a link may lead to a file of this user's, whose digest is a secret.
            note = msgspec.json.encode({"expected": each.entry.digest})
            storage.write(layout.damage_key(*each.entry.place(uuid)), note)
        except StorageError as error:
            _logger.warning("later checkpoints may refer to a damaged file: %s", error)


def _forget_damage(storage: Storage, uuid: str, whole: Iterable[FileEntry]) -> None:
    """Delete the notes on files that have just been found whole. Only warns, as `note_damage`."""
    try:
        for entry in noted_damage(storage, uuid, whole):
            storage.remove(layout.damage_key(*entry.place(uuid)))
    except StorageError as error:
        _logger.warning("later checkpoints store the content of a whole file again: %s", error)


def noted_damage(storage: Storage, uuid: str, entries: Iterable[FileEntry]) -> list[FileEntry]:
    """The files that `note_damage` has noted, also while another checkpoint's files were read."""
    wanted = list(entries)
    noted: set[str] = set()
    for owner in dict.fromkeys(entry.place(uuid)[0] for entry in wanted):
        noted.update(storage.sizes(layout.damages_folder(owner)))
    return [entry for entry in wanted if layout.damage_key(*entry.place(uuid)) in noted]


def refuse_damaged(storage: Storage, uuid: str, damage: Damage) -> NoReturn:
    """Note a damaged file, and raise the `damage_error`."""
    note_damage(storage, uuid, [damage])
    raise damage_error(storage, uuid, [damage])


def damage_error(storage: Storage, uuid: str, damage: Iterable[Damage]) -> CheckpointDamaged:
    """The error for a damaged checkpoint; names every damaged file."""
    return CheckpointDamaged(
        f"checkpoint {uuid} is damaged: {'; '.join(map(str, damage))}; in "
        f"{storage.url}/{layout.files_folder(uuid)}. The stored files changed after the commit: "
        "use another checkpoint"
    )


Range = tuple["StoredFile", int, int]


class StoredFile:
    """One stored file that several threads read in ranges. Once it is verified, it is written to
    `target`; None: it is only read."""

    def __init__(self, entry: FileEntry, key: str, target: Path | None = None) -> None:
        self.entry = entry
        self.key = key
        self.damage: Damage | None = None
        self.version: str | None = None
        self._target = target
        self._part: PartFile | None = None
        self._digest = hashlib.sha256()
        self._hashed_bytes = 0
        self._turn = Condition()

    def ranges(self) -> Iterator[Range]:
        """The file's ranges, as (file, start, end). An empty file has one empty range."""
        step = buffer_pool.PIECE_BYTES
        for start in range(0, max(self.entry.size_bytes, 1), step):
            yield self, start, min(start + step, self.entry.size_bytes)

    def read(
        self,
        storage: Storage,
        start: int,
        view: memoryview,
        stop: CancelSignal,
        on_damage: Callable[[Damage], None],
    ) -> None:
        """Read a range into `view`, write it, and hash it after all earlier ranges."""
        if self.damage is not None:
            return
        piece = RangeRead(0, None)
        if view:
            piece = storage.read_into(self.key, start, view, stop, self.version)
        if self._target is not None:
            with self._turn:
                if self._part is None:
                    self._part = PartFile(self._target)
                part = self._part
            part.write_at(view[: piece.size_bytes], start)
        with stop.calling(self._wake), self._turn:
            while self._hashed_bytes != start and self.damage is None:
                stop.check()
                self._turn.wait()
            if self.damage is not None:
                return
            self.damage = self._hash(view, piece)
            self._turn.notify_all()
        if self.damage is not None:
            on_damage(self.damage)

    def again(self) -> StoredFile:
        """The same file, of which nothing is read."""
        return StoredFile(self.entry, self.key, self._target)

    def close(self) -> None:
        """Delete the local file if it was not verified."""
        if self._part is not None:
            self._part.drop()

    def _hash(self, view: memoryview, piece: RangeRead) -> Damage | None:
        """Hash the next range; after the last one, compare the digest and keep the local file."""
        self.version = self.version or piece.version
        if piece.version != self.version:
            return Damage(self.entry, None, was_overwritten=True)
        self._digest.update(view[: piece.size_bytes])
        self._hashed_bytes += piece.size_bytes
        if piece.size_bytes < len(view):
            return Damage(self.entry, self._hashed_bytes)
        if self._hashed_bytes < self.entry.size_bytes:
            return None
        seen = f"sha256:{self._digest.hexdigest()}"
        if seen != self.entry.digest:
            return Damage(self.entry, self.entry.size_bytes, seen)
        if self._part is not None:
            self._part.keep()
            self._part = None
        return None

    def _wake(self) -> None:
        with self._turn:
            self._turn.notify_all()


def read_files(
    storage: Storage,
    files: Sequence[StoredFile],
    on_damage: Callable[[Damage], None],
    on_read: OnRead = unheard,
) -> None:
    """Read whole files, each byte once; write the files that have a target. `on_damage` is called
    once for each damaged file; it may raise to end all reads.

    A file with another digest is read a second time: a bit may have flipped in transit.
    """

    def refuse_unless_in_transit(damage: Damage) -> None:
        if damage.seen_digest is None:
            on_damage(damage)

    _read_once(storage, files, refuse_unless_in_transit, on_read)
    if again := [file.again() for file in files if file.damage and file.damage.seen_digest]:
        _read_once(storage, again, on_damage)


def _read_once(
    storage: Storage,
    files: Sequence[StoredFile],
    on_damage: Callable[[Damage], None],
    on_read: OnRead = unheard,
) -> None:
    buffers, lock, done = storage.buffers, Lock(), 0
    total = sum(file.entry.size_bytes for file in files)
    ranges = (each for file in files for each in file.ranges())

    def take(stop: CancelSignal) -> tuple[Range, bytearray] | None:
        # The range and its buffer together, to avoid a deadlock: a range keeps its buffer until all
        # earlier ranges are hashed, so the earlier ranges must have theirs.
        with lock:
            if (taken := next(ranges, None)) is None:
                return None
            _, start, end = taken
            return taken, buffers.acquire(end - start, stop)

    def work(number: int, stop: CancelSignal) -> None:
        nonlocal done
        while (taken := take(stop)) is not None:
            (file, start, end), buffer = taken
            try:
                file.read(storage, start, memoryview(buffer)[: end - start], stop, on_damage)
            finally:
                buffers.release(buffer)
            with lock:
                done += end - start
                on_read(done, total)

    with buffers.in_use():
        try:
            in_parallel(work, range(READ_THREADS), READ_THREADS)
        finally:
            for file in files:
                file.close()
