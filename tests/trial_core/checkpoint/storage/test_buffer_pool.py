from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from trial_core.checkpoint.storage import buffer_pool
from trial_core.checkpoint.storage.buffer_pool import BufferPool, piece_bytes
from trial_core.checkpoint.storage.parallel import CancelSignal, WorkCancelled

MIB = 2**20


def test_the_pool_has_a_fixed_number_of_buffers() -> None:
    """A thread that needs one more waits until a buffer is released."""
    pool_of_two, waiting = BufferPool(2), Event()
    acquired = [pool_of_two.acquire(10, CancelSignal()) for _ in range(2)]

    def acquire() -> int:
        waiting.set()
        return id(pool_of_two.acquire(10, CancelSignal()))

    with ThreadPoolExecutor(1) as threads:
        third = threads.submit(acquire)
        waiting.wait(10)
        assert not third.done()
        pool_of_two.release(acquired[0])
        assert third.result(10) == id(acquired[0])


def test_a_wait_for_a_buffer_can_be_stopped() -> None:
    """Cancelled work does not wait for its turn."""
    pool_of_one, stop = BufferPool(1), CancelSignal()
    pool_of_one.acquire(1, CancelSignal())
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(pool_of_one.acquire, 1, stop)
        stop.set()
        with pytest.raises(WorkCancelled):
            waiting.result(10)


def test_memory_is_kept_only_while_the_pool_is_in_use() -> None:
    """Within a transfer a buffer is reused; between transfers its memory is freed."""
    pool_of_one = BufferPool(1)
    with pool_of_one.in_use():
        first = pool_of_one.acquire(MIB, CancelSignal())
        pool_of_one.release(first)
        assert pool_of_one.acquire(MIB // 2, CancelSignal()) is first
        pool_of_one.release(first)
    assert len(pool_of_one.acquire(0, CancelSignal())) == 0


@pytest.mark.parametrize(
    ("size_bytes", "pieces"), [(0, 0), (16 * MIB, 1), (16 * MIB + 1, 2), (156 * 1024 * MIB, 9984)]
)
def test_a_file_is_cut_into_pieces_of_16_mib(size_bytes: int, pieces: int) -> None:
    """The piece size is the same for all files that fit into 10,000 pieces."""
    assert piece_bytes(size_bytes) == 16 * MIB
    assert -(-size_bytes // piece_bytes(size_bytes)) == pieces


@pytest.mark.parametrize("size_bytes", [10_000 * 16 * MIB + 1, 5 * 2**40])
def test_a_huge_file_has_at_most_10000_pieces(size_bytes: int) -> None:
    """S3 allows no more parts, so the pieces grow."""
    assert piece_bytes(size_bytes) > 16 * MIB
    assert -(-size_bytes // piece_bytes(size_bytes)) <= buffer_pool.MAX_PIECES
