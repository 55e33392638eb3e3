"""Reading stored files in parallel ranges, verified, in bounded memory.

Several threads read ranges of several files, or of one, each into a buffer of the storage's window.
A range is written where it belongs at once, and hashed when all before it have been; so a file's
digest is that of its bytes in order, and nothing is read twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Lock

from trial_core.checkpoint.manifest import FileEntry
from trial_core.storage import buffer_pool
from trial_core.storage.base import Storage
from trial_core.storage.chunks import RangeRead
from trial_core.storage.local import PartFile
from trial_core.storage.parallel import StopSignal, in_parallel

READ_THREADS = buffer_pool.WINDOW_PIECES
"""Ranges read at once. Each has a piece of the storage's window in memory, and no more."""


@dataclass(frozen=True)
class Damage:
    """How a stored file differs from what its manifest promises.

    Attributes:
        entry: what was promised.
        seen_bytes: its size in the storage, None when it is missing.
        seen_digest: its digest in the storage; None when the size alone tells.
        is_moving: whether somebody has overwritten it while it was read.
    """

    entry: FileEntry
    seen_bytes: int | None
    seen_digest: str | None = None
    is_moving: bool = False

    def __str__(self) -> str:
        promised = self.entry
        file = f"{promised.path}, written by rank {promised.rank},"
        if self.is_moving:
            return f"{file} was overwritten while it was read (expected {promised.digest})"
        if self.seen_bytes is None:
            return f"{file} is missing (expected {promised.size_bytes} bytes, {promised.digest})"
        if self.seen_digest is None:
            return f"{file} has {self.seen_bytes} bytes, expected {promised.size_bytes}"
        return f"{file} has digest {self.seen_digest}, expected {promised.digest}"


_NOTHING = RangeRead(0, None)

Range = tuple["StoredFile", int, int]


class StoredFile:
    """One stored file under way: what the threads that read its ranges share.

    Args:
        key: its key in the storage.
        target: what it becomes on local disk, once it is known to be right; None: it is only read.
    """

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
        """Where its ranges begin and end; at least one, be it empty."""
        step = buffer_pool.PIECE_BYTES
        for start in range(0, max(self.entry.size_bytes, 1), step):
            yield self, start, min(start + step, self.entry.size_bytes)

    def read(
        self,
        storage: Storage,
        start: int,
        view: memoryview,
        stop: StopSignal,
        on_damage: Callable[[Damage], None],
    ) -> None:
        """Read a range into `view`, write it, and hash it when its turn has come."""
        if self.damage is not None:
            return
        piece = storage.read_into(self.key, start, view, stop, self.version) if view else _NOTHING
        if self._target is not None:
            self._opened(self._target).write_at(view[: piece.size_bytes], start)
        with stop.waking(self._wake), self._turn:
            while self._hashed_bytes != start and self.damage is None:
                stop.check()
                self._turn.wait()
            if self.damage is not None:
                return
            self.damage = self._take_turn(view, piece)
            self._turn.notify_all()
        if self.damage is not None:
            on_damage(self.damage)

    def close(self) -> None:
        """Nothing more comes: drop what has not become a file."""
        if self._part is not None:
            self._part.drop()
            self._part = None

    def _take_turn(self, view: memoryview, piece: RangeRead) -> Damage | None:
        """Hash a range, all before which have been; with the last one, judge the whole."""
        self.version = self.version or piece.version
        if piece.version != self.version:
            return Damage(self.entry, None, is_moving=True)
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

    def _opened(self, target: Path) -> PartFile:
        with self._turn:
            if self._part is None:
                self._part = PartFile(target)
            return self._part

    def _wake(self) -> None:
        with self._turn:
            self._turn.notify_all()


def read_files(
    storage: Storage,
    files: Sequence[StoredFile],
    on_damage: Callable[[Damage], None],
    threads: int = READ_THREADS,
) -> None:
    """Read files whole, each byte once; those with a target become files there.

    Args:
        on_damage: told, once, of each file that is not what was promised; may raise to end it all.
    """
    ranges = _Ranges(storage, files)

    def work(number: int, stop: StopSignal) -> None:
        while (taken := ranges.take(stop)) is not None:
            (file, start, end), buffer = taken
            try:
                file.read(storage, start, memoryview(buffer)[: end - start], stop, on_damage)
            finally:
                storage.window.give_back(buffer)

    with storage.window.in_use():
        try:
            in_parallel(work, range(threads), threads)
        finally:
            for file in files:
                file.close()


class _Ranges:
    """The ranges of all files, in order, each handed out together with its buffer.

    Together, because a range waits with its buffer for those before it: were they still waiting
    for buffers, it would be for ever.
    """

    def __init__(self, storage: Storage, files: Sequence[StoredFile]) -> None:
        self._window = storage.window
        self._left = (each for file in files for each in file.ranges())
        self._lock = Lock()

    def take(self, stop: StopSignal) -> tuple[Range, bytearray] | None:
        """The next range and a buffer for it; None when there is none left."""
        with self._lock:
            taken = next(self._left, None)
            if taken is None:
                return None
            _, start, end = taken
            return taken, self._window.take(end - start, stop)
