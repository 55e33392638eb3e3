"""Shards are written from an accelerator through one host buffer. The accelerator is a fake."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.fake_accelerator import FakeAccelerator, Memory, fake_accelerator
from trial_core.errors import CheckpointError
from trial_core.processes.machine.memory_files import MemoryFiles
from trial_core.rank.collectives import accelerator
from trial_core.rank.state_files.storage_bytes import copy_by_threads
from trial_core.rank.state_files.tensor_files import _FilledFile, write_tensors

BUFFER_BYTES = 64


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAccelerator]:
    monkeypatch.setattr(accelerator, "HOST_BUFFER_BYTES", BUFFER_BYTES)
    with fake_accelerator() as installed:
        yield installed


def state() -> dict[str, Any]:
    """Storages shorter and longer than the buffer; shared, empty, sliced and without data."""
    shared = torch.arange(100, dtype=torch.float64)
    return {
        "empty": torch.empty(0),
        "shared": [shared, shared[3:7].view(2, 2), torch.nn.Parameter(shared)],
        "short": torch.tensor([2.0, 3.0, 5.0], dtype=torch.bfloat16),
        "as long": torch.arange(BUFFER_BYTES, dtype=torch.uint8),
        "strided": torch.arange(60.0).view(6, 10).t()[1:],
        "placeholder": torch.empty(7, device="meta"),
        "step": 11,
    }


def as_torch_saves(content: Any) -> bytes:
    file = io.BytesIO()
    with torch.utils.serialization.config.patch({"save.compute_crc32": False}):
        torch.save(content, file)
    return file.getvalue()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("can_pin", [True, False])
def test_a_file_from_an_accelerator_is_the_one_that_torch_writes(
    fake: FakeAccelerator, caplog: pytest.LogCaptureFixture, can_pin: bool
) -> None:
    """Byte for byte, through a buffer of a fixed size, which is pageable where pinning fails."""
    fake.can_pin = can_pin
    content, file = state(), io.BytesIO()
    for _ in range(3):
        file = io.BytesIO()
        write_tensors(content, file)
    assert file.getvalue() == as_torch_saves(content)
    assert fake.pinned_bytes == (BUFFER_BYTES if can_pin else 0)
    assert ("cannot pin" in caplog.text) is not can_pin


def test_a_file_without_an_accelerator_is_the_one_that_torch_writes() -> None:
    """Byte for byte."""
    content, file = state(), io.BytesIO()
    write_tensors(content, file)
    assert file.getvalue() == as_torch_saves(content)


def test_another_layout_than_torchs_is_refused() -> None:
    """The bytes of a tensor never lie where another one's should."""
    file = _FilledFile(io.BytesIO(), [torch.zeros(3).untyped_storage()])
    for found_bytes in (12, 0):
        with pytest.raises(
            CheckpointError,
            match=f"left room for 8 bytes of .*next one has {found_bytes};",
        ):
            file.seek(8, 1)


def test_several_threads_copy_into_a_memory_file(tmp_path: Path) -> None:
    """Byte for byte, of tensors that are no multiple of a page; again into the same memory."""
    lengths: list[int] = []

    def copy(data: memoryview, room: memoryview) -> None:
        lengths.append(data.nbytes)
        copy_by_threads(data, room)

    memory = MemoryFiles(2**26, copy=copy)
    for number in range(2):
        content = [torch.randint(256, (size,), dtype=torch.uint8) for size in (3, 2**22 + 7, 2**21)]
        memory.begin()
        memory.write(tmp_path, "shard.pt", partial(write_tensors, content))
        memory.end()
        assert (tmp_path / "shard.pt").read_bytes() == as_torch_saves(content)
        assert len(lengths) == 2 * (number + 1)
    memory.close()


@pytest.mark.usefixtures("fake")
def test_a_storage_is_never_on_the_host_as_a_whole() -> None:
    """A snapshot needs no more host memory than the buffer, beside the file."""
    sizes: list[int] = []

    class File(io.BytesIO):
        def write(self, data: Any) -> int:
            sizes.append(memoryview(data).nbytes)
            return super().write(data)

    content = {"weights": torch.arange(1000.0)}
    write_tensors(content, File())
    pieces = [size for size in sizes if size == BUFFER_BYTES // 2]
    assert len(pieces) >= 4000 // (BUFFER_BYTES // 2)
    assert max(sizes) < 1000  # torch's own records
    with Memory() as memory:
        write_tensors(content, io.BytesIO())
    assert memory.peak_bytes <= BUFFER_BYTES


def test_an_accelerator_copies_while_the_host_writes(fake: FakeAccelerator) -> None:
    """The next half of the buffer fills meanwhile; a piece is written once it has arrived."""

    class File(io.BytesIO):
        def write(self, data: Any) -> int:
            if memoryview(data).nbytes == BUFFER_BYTES // 2 and fake.copies:
                fake.copies.append("written")
            return super().write(data)

    write_tensors(torch.arange(3 * BUFFER_BYTES // 2, dtype=torch.uint8), File())
    first, second, third = ["begun"], ["begun", "waited for", "written"], ["waited for", "written"]
    assert fake.copies[:9] == [*first, *second, *second, *third]
