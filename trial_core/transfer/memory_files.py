"""File images in memory: what a rank copies its shards into, and uploads from.

An image is a file without a disk under it (Linux: ``memfd_create``), in place of a file in the
staging folder. There a link stands to it, so whoever opens that path, in this process or another,
reads the image. Its memory is kept for the next snapshot, because getting memory costs more than
filling it; and it goes with the process, however that ends.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import IO

import psutil

logger = logging.getLogger(__name__)

GIB = 2**30

GROWTH_BYTES = 64 * 2**20
"""How much longer than needed a growing file is made; what is not written takes no memory."""

_IMAGE_PATH = re.compile(r"/proc/\d+/fd/\d+")
_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


class MemoryFiles:
    """This rank's images: a file each, by its path in the staging folder.

    Args:
        limit_bytes: the most memory they may take together; what does not fit goes to disk.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes if hasattr(os, "memfd_create") else 0
        self._images: dict[str, MemoryFile] = {}
        self._written: set[str] = set()

    def begin(self) -> None:
        """A new snapshot begins: nobody may be reading the last one any more."""
        self._written.clear()

    def end(self) -> None:
        """The snapshot is complete: give back the memory of files that it no longer has."""
        for name in self._images.keys() - self._written:
            self._images.pop(name).close()

    def close(self) -> None:
        """Give all memory back."""
        self._written.clear()
        self.end()

    def write(self, folder: Path, name: str, write: Callable[[IO[bytes]], None]) -> None:
        """Write a file of a snapshot: into its image, or to disk where memory does not suffice.

        Args:
            folder: the staging folder.
            name: POSIX path below it.
            write: is given the file, empty.
        """
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        if self._limit_bytes == 0:
            with open(path, "wb") as file:
                write(file)
            return
        # Not setdefault: an image that is made in vain would keep its descriptor.
        image = self._images.get(name)
        if image is None:
            image = self._images[name] = MemoryFile(name, self._allows)
        image.begin()
        with _Target(image, path) as target:
            write(target)  # type: ignore[arg-type]  # as much of a file as torch.save needs
        if target.is_on_disk:
            self._images.pop(name).close()
            logger.warning(
                "a snapshot in memory may take %.1f GiB on this rank, and %s does not fit: it is "
                "staged on disk, which holds up training for longer; "
                "checkpointing.memory_gib_per_rank sets the limit",
                self._limit_bytes / GIB, name,
            )  # fmt: skip
        else:
            image.end()
            self._written.add(name)
            path.symlink_to(image.path)

    def _allows(self, more_bytes: int) -> bool:
        kept_bytes = sum(image.kept_bytes for image in self._images.values())
        return more_bytes <= 0 or kept_bytes + more_bytes <= self._limit_bytes


class _Target:
    """What a file of a snapshot is written to: its image, and disk once that may not grow further.

    A write that does not fit must not raise: `torch.save` would end its archive on the way out, and
    raise something else. Nor is anything written twice: most of the time is that of the copy from
    the accelerator.
    """

    def __init__(self, image: MemoryFile, path: Path) -> None:
        self._image = image
        self._path = path
        self._file: IO[bytes] | None = None

    def __enter__(self) -> _Target:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    @property
    def is_on_disk(self) -> bool:
        """Whether what was written is on disk, all of it."""
        return self._file is not None

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append; how many bytes."""
        view = memoryview(data).cast("B")
        if self._file is None and not self._image.append(view):
            self._file = open(self._path, "wb")  # noqa: SIM115  # see `__exit__`
            self._image.copy_to(self._file)
        if self._file is not None:
            self._file.write(view)
        return view.nbytes

    def flush(self) -> None:
        """Nothing that others could see is held back: they look when the file is complete."""


class MemoryFile:
    """A file in memory, written at its end.

    Args:
        allows: whether so many more bytes of memory may be taken.

    Attributes:
        size_bytes: how much has been written.
        kept_bytes: how much memory it has.
    """

    def __init__(self, name: str, allows: Callable[[int], bool]) -> None:
        self._allows = allows
        self._fd = os.memfd_create(f"trialflow {name}"[:200], os.MFD_CLOEXEC)
        self._capacity_bytes = GROWTH_BYTES
        os.ftruncate(self._fd, self._capacity_bytes)
        self._map = mmap.mmap(self._fd, self._capacity_bytes)
        self.size_bytes = 0
        self.kept_bytes = 0

    @property
    def path(self) -> str:
        """Where any process of this user can open it, while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def begin(self) -> None:
        """Write from the start again, over what is there."""
        os.ftruncate(self._fd, self._capacity_bytes)
        self.size_bytes = 0

    def append(self, view: memoryview) -> bool:
        """Write more; False, and nothing is written, if that would take more than is allowed."""
        end = self.size_bytes + view.nbytes
        if not self._allows(end - self.kept_bytes):
            return False
        if end > self._capacity_bytes:
            self._grow(end)
        self._map[self.size_bytes : end] = view
        self.size_bytes = end
        self.kept_bytes = max(self.kept_bytes, end)
        return True

    def copy_to(self, file: IO[bytes]) -> None:
        """Write all of it to a file."""
        with memoryview(self._map) as whole, whole[: self.size_bytes] as written:
            file.write(written)

    def end(self) -> None:
        """Make the file as long as what was written, and give back the rest of its memory."""
        os.ftruncate(self._fd, self.size_bytes)
        self.kept_bytes = self.size_bytes

    def close(self) -> None:
        """Give the memory back, once nobody has the file open."""
        self._map.close()
        os.close(self._fd)

    def _grow(self, to_bytes: int) -> None:
        self._capacity_bytes = to_bytes + GROWTH_BYTES
        os.ftruncate(self._fd, self._capacity_bytes)
        self._map.close()
        self._map = mmap.mmap(self._fd, self._capacity_bytes)


def is_memory_file(path: Path) -> bool:
    """Whether `path` is a link to an image, of this process or another."""
    return path.is_symlink() and _IMAGE_PATH.fullmatch(os.readlink(path)) is not None


def default_limit_bytes(ranks: int) -> int:
    """Half of the memory that is free on this machine now, divided among its `ranks`."""
    free = psutil.virtual_memory().available
    for limit, used in _CGROUP_FILES:
        try:
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # not in such a group, or without a limit ("max")
            continue
    return max(0, free // 2 // ranks)
