"""The buffer pool: a bound on the memory that transfers take.

Files are moved in pieces of `PIECE_BYTES`, each in one buffer of the storage's pool. All transfers
of a storage share the pool: a thread waits for a free buffer before it reads another piece. So a
process uses at most `POOL_BUFFERS` x `PIECE_BYTES` = 96 MiB. Pieces are larger only for files above
156 GiB, which would need more than 10,000 of them.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from trial_core.checkpoint.storage.parallel import CancelSignal

PIECE_BYTES = 16 * 2**20
"""Size of an upload's part and of a ranged read."""

POOL_BUFFERS = 6
"""Pieces in flight at once."""

MAX_PIECES = 10_000
"""The most parts that S3 allows in an object."""

_POLL_SECONDS = 0.2


def piece_bytes(size_bytes: int) -> int:
    """The piece size for a file of `size_bytes`."""
    return max(PIECE_BYTES, -(-size_bytes // MAX_PIECES))


class BufferPool:
    """A fixed number of reusable buffers. Safe to use from threads and from finalizers. Memory is
    kept between pieces, because allocating costs more than filling; it is freed when no transfer is
    in flight."""

    def __init__(self, buffers: int = POOL_BUFFERS) -> None:
        # SimpleQueue.put is reentrant, so a finalizer may call it inside any other method.
        self._free: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
        for _ in range(buffers):
            self._free.put(bytearray())
        self._lock = Lock()
        self._users = 0

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the buffers' memory until the block ends."""
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    for _ in range(self._free.qsize()):
                        self._free.get_nowait()
                        self._free.put(bytearray())

    def acquire(self, size_bytes: int, stop: CancelSignal) -> bytearray:
        """Wait for a buffer of at least `size_bytes`; `release` it afterwards. Raises WorkCancelled
        if `stop` was set."""
        while True:
            stop.check()
            try:
                buffer = self._free.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            # Extending the buffer would copy its old bytes.
            return buffer if len(buffer) >= size_bytes else bytearray(size_bytes)

    @contextmanager
    def lent(self, size_bytes: int, stop: CancelSignal) -> Iterator[bytearray]:
        """A buffer from `acquire`, released when the block ends."""
        buffer = self.acquire(size_bytes, stop)
        try:
            yield buffer
        finally:
            self.release(buffer)

    def release(self, buffer: bytearray) -> None:
        """Return a buffer that is no longer read or written."""
        self._free.put(buffer)
