"""A bound on the memory that transfers take: pieces of files, each in a buffer of one window.

A window is shared by everything that is under way in a storage, over all files together. Whoever
wants to read another piece waits for a buffer; so however many files there are, and however large,
no more than `WINDOW_PIECES` pieces of `PIECE_BYTES` are in memory: 96 MiB a process. Only for a
file that does not fit into 10,000 pieces (of 156 GiB, and more) are pieces larger.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from trial_core.storage.parallel import StopSignal

PIECE_BYTES = 16 * 2**20
"""Size of a part of an upload, and of a ranged read."""

WINDOW_PIECES = 6
"""How many of them are under way at once."""

MAX_PIECES = 10_000
"""The most parts that S3 lets an object have."""

_LOOK_SECONDS = 0.2


def piece_bytes(size_bytes: int) -> int:
    """How large the pieces of a file are."""
    smallest_allowed = -(-size_bytes // MAX_PIECES)
    return max(PIECE_BYTES, smallest_allowed)


class Window:
    """Buffers for so many pieces. Safe to use from several threads, and from finalizers.

    The memory is kept from piece to piece, because getting memory costs more than filling it, and
    given back when nothing is under way.
    """

    def __init__(self, pieces: int = WINDOW_PIECES) -> None:
        # Of its methods, put may be called even while the same thread is inside another of them.
        self._free: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
        for _ in range(pieces):
            self._free.put(bytearray())
        self._lock = Lock()
        self._users = 0

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """For as long as a transfer lasts, memory is kept."""
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._drop_memory()

    def take(self, size_bytes: int, stop: StopSignal) -> bytearray:
        """A buffer of at least that size, once there is one; give it back.

        Raises:
            Stopped: it is not wanted any more.
        """
        while True:
            stop.check()
            try:
                buffer = self._free.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                continue
            # A new one rather than a longer one: of that the old bytes would be copied.
            return buffer if len(buffer) >= size_bytes else bytearray(size_bytes)

    def give_back(self, buffer: bytearray) -> None:
        """Nobody reads or writes that buffer any more."""
        self._free.put(buffer)

    def _drop_memory(self) -> None:
        for _ in range(self._free.qsize()):
            self._free.get_nowait()
            self._free.put(bytearray())


def read_piece(file: int, offset: int, view: memoryview) -> bool:
    """Fill `view` with what an open file holds from `offset` on; whether there is as much."""
    done = 0
    while done < len(view) and (more := os.preadv(file, [view[done:]], offset + done)):
        done += more
    return done == len(view)
