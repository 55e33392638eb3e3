"""File images in memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from trial_core.transfer.memory_files import (
    GROWTH_BYTES,
    MemoryFiles,
    default_limit_bytes,
    is_memory_file,
)
from trial_core.transfer.staging import staged_files

LIMIT_BYTES = 1000


def holding(content: bytes) -> Callable[[IO[bytes]], None]:
    """A writer that gives its file some content, in two pieces."""

    def write(file: IO[bytes]) -> None:
        file.write(content[:3])
        file.write(memoryview(content)[3:])

    return write


def snapshot(images: MemoryFiles, folder: Path, files: dict[str, bytes]) -> None:
    images.begin()
    for name, content in files.items():
        images.write(folder, name, holding(content))
    images.end()


@pytest.mark.parametrize("second", [b"longer than it was before", b"short", b"as long"])
def test_an_image_reads_as_the_file_that_was_written_last(tmp_path: Path, second: bytes) -> None:
    """Its memory is used again, and nothing of an earlier snapshot shows through."""
    images = MemoryFiles(LIMIT_BYTES)
    snapshot(images, tmp_path / "a", {"model/shard.pt": b"as long"})
    snapshot(images, tmp_path / "b", {"model/shard.pt": second})
    path = tmp_path / "b" / "model" / "shard.pt"
    assert is_memory_file(path)
    assert path.read_bytes() == second
    images.close()


def test_an_image_may_grow_beyond_what_was_set_aside(tmp_path: Path) -> None:
    """A file that is longer than expected is made room for, with what was written kept."""
    content = os.urandom(1 << 20) * (GROWTH_BYTES // (1 << 20) + 2)
    images = MemoryFiles(2 * len(content))
    snapshot(images, tmp_path, {"shard.pt": content})
    assert (tmp_path / "shard.pt").read_bytes() == content
    images.close()


def test_another_process_reads_an_image(tmp_path: Path) -> None:
    """By its path in the staging folder: so the upload needs no copy."""
    images = MemoryFiles(LIMIT_BYTES)
    snapshot(images, tmp_path, {"shard.pt": b"seen from afar"})
    read = "import sys; print(open(sys.argv[1]).read())"
    seen = subprocess.check_output([sys.executable, "-c", read, tmp_path / "shard.pt"], text=True)
    assert seen == "seen from afar\n"
    images.close()


def test_images_are_files_of_the_checkpoint(tmp_path: Path) -> None:
    """Links that lead out of the staging folder are left out, those to images are not."""
    images = MemoryFiles(LIMIT_BYTES)
    snapshot(images, tmp_path, {"model/shard.pt": b"weights"})
    (tmp_path / "elsewhere").symlink_to("/etc/hostname")
    assert staged_files(tmp_path, rank=0) == ["model/shard.pt"]
    images.close()


@pytest.mark.parametrize("room", [0, 2, 100], ids=["none", "for its first bytes", "for some"])
def test_what_does_not_fit_goes_to_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    """The limit is for all images together; beyond it nothing is lost, and it is said."""
    images, fits = MemoryFiles(LIMIT_BYTES), os.urandom(LIMIT_BYTES - room)
    snapshot(images, tmp_path, {"fits": fits, "over": b"over" * 250})
    assert is_memory_file(tmp_path / "fits")
    assert not (tmp_path / "over").is_symlink()
    assert (tmp_path / "fits").read_bytes() == fits
    assert (tmp_path / "over").read_bytes() == b"over" * 250
    assert "checkpointing.memory_gib_per_rank" in caplog.text
    images.close()


def test_what_does_not_fit_is_written_once(tmp_path: Path) -> None:
    """Each write may be a copy from an accelerator, which holds up training."""
    images, written = MemoryFiles(LIMIT_BYTES), []

    def write(file: IO[bytes]) -> None:
        written.append(file.write(b"x" * LIMIT_BYTES))
        written.append(file.write(b"y"))

    images.begin()
    images.write(tmp_path, "over", write)
    assert written == [LIMIT_BYTES, 1]
    images.close()


def test_without_memory_all_is_staged_on_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit of 0 asks for it, so that it is no news."""
    snapshot(images := MemoryFiles(0), tmp_path, {"a": b"12"})
    assert not (tmp_path / "a").is_symlink()
    assert (tmp_path / "a").read_bytes() == b"12"
    assert caplog.text == ""
    images.close()


@pytest.mark.parametrize("size", [LIMIT_BYTES, LIMIT_BYTES + 1], ids=["in memory", "on disk"])
def test_snapshots_leave_no_descriptors(tmp_path: Path, size: int) -> None:
    """A run of many checkpoints would come to the end of what a process may have open."""

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    images = MemoryFiles(LIMIT_BYTES)
    snapshot(images, tmp_path / "first", {"shard.pt": b"x" * size})
    after_one = descriptors()
    for number in range(5):
        snapshot(images, tmp_path / str(number), {"shard.pt": b"x" * size})
    assert descriptors() == after_one
    images.close()


def test_files_that_are_saved_no_more_give_their_memory_back(tmp_path: Path) -> None:
    """A snapshot of other files does not add to the memory of those before it."""
    images = MemoryFiles(LIMIT_BYTES)
    snapshot(images, tmp_path / "a", {"one": b"x" * 600})
    snapshot(images, tmp_path / "b", {"two": b"y" * 300})
    snapshot(images, tmp_path / "c", {"two": b"y" * 300, "three": b"z" * 600})
    assert is_memory_file(tmp_path / "c" / "three")
    images.close()


def test_by_default_some_memory_is_left_to_training() -> None:
    """At most half of what is free is taken, by all ranks of a machine together."""
    import psutil

    free = psutil.virtual_memory().total
    assert 0 < 4 * default_limit_bytes(4) <= free / 2
