from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from trial_core.storage import buffer_pool
from trial_core.storage.buffer_pool import Window, piece_bytes, read_piece
from trial_core.storage.parallel import StopSignal, WorkCancelled

MIB = 2**20


def test_no_more_pieces_than_the_window_has() -> None:
    """Whoever wants one more waits until one is given back."""
    two, waiting = Window(2), Event()
    taken = [two.take(10, StopSignal()) for _ in range(2)]

    def take() -> int:
        waiting.set()
        return id(two.take(10, StopSignal()))

    with ThreadPoolExecutor(1) as pool:
        third = pool.submit(take)
        waiting.wait(10)
        assert not third.done()
        two.give_back(taken[0])
        assert third.result(10) == id(taken[0])


def test_who_waits_for_a_piece_can_be_stopped() -> None:
    """Work that is not wanted any more does not wait for its turn."""
    one, stop = Window(1), StopSignal()
    one.take(1, StopSignal())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one.take, 1, stop)
        stop.set()
        with pytest.raises(WorkCancelled):
            waiting.result(10)


def test_memory_is_kept_while_in_use_and_no_longer() -> None:
    """Within a transfer a buffer is filled again; between transfers there is none."""
    one = Window(1)
    with one.in_use():
        first = one.take(MIB, StopSignal())
        one.give_back(first)
        assert one.take(MIB // 2, StopSignal()) is first
        one.give_back(first)
    assert len(one.take(0, StopSignal())) == 0


@pytest.mark.parametrize(
    ("size_bytes", "pieces"),
    [(0, 0), (1, 1), (16 * MIB, 1), (16 * MIB + 1, 2), (156 * 1024 * MIB, 9984)],
)
def test_files_are_cut_into_pieces_of_one_size(size_bytes: int, pieces: int) -> None:
    """16 MiB, whatever the file, as long as that is enough."""
    assert piece_bytes(size_bytes) == 16 * MIB
    assert -(-size_bytes // piece_bytes(size_bytes)) == pieces


@pytest.mark.parametrize("size_bytes", [10_000 * 16 * MIB + 1, 5 * 2**40])
def test_a_huge_file_fits_into_what_s3_allows(size_bytes: int) -> None:
    """No file has more than 10,000 parts: pieces grow instead."""
    assert piece_bytes(size_bytes) > 16 * MIB
    assert -(-size_bytes // piece_bytes(size_bytes)) <= buffer_pool.MAX_PIECES


def test_a_piece_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    """A file that is shorter than expected is not taken for the rest of the buffer."""
    (tmp_path / "file").write_bytes(b"0123456789")
    with open(tmp_path / "file", "rb") as file:
        view = memoryview(bytearray(6))
        assert read_piece(file.fileno(), 4, view)
        assert bytes(view) == b"456789"
        assert not read_piece(file.fileno(), 5, view)
    assert os.path.getsize(tmp_path / "file") == 10
