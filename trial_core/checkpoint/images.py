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


class OverLimitError(Exception):
    """An image would take more memory than the images may. Never leaves `Images.write`."""


class Images:
    """This rank's images: a file each, by its path in the staging folder.

    Args:
        limit_bytes: the most memory they may take together; what does not fit goes to disk.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes if hasattr(os, "memfd_create") else 0
        self._images: dict[str, Image] = {}
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
            write: is given the file, empty; may be called twice.
        """
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        image = self._images.setdefault(name, Image(name, self._allow))
        try:
            image.begin()
            write(image)  # type: ignore[arg-type]  # as much of a file as torch.save needs
            image.end()
        except OverLimitError:
            self._images.pop(name).close()
            logger.warning(
                "a snapshot in memory may take %.1f GiB on this rank, and %s does not fit: it is "
                "staged on disk, which holds up training for longer; "
                "checkpointing.memory_gib_per_rank sets the limit",
                self._limit_bytes / GIB, name,
            )  # fmt: skip
            with open(path, "wb") as file:
                write(file)
        else:
            self._written.add(name)
            path.symlink_to(image.path)

    def _allow(self, more_bytes: int) -> None:
        if more_bytes > 0:
            kept_bytes = sum(image.kept_bytes for image in self._images.values())
            if kept_bytes + more_bytes > self._limit_bytes:
                raise OverLimitError


class Image:
    """A file in memory, open for writing at its end.

    Args:
        allow: is told how many more bytes of memory a write needs; raises to refuse.

    Attributes:
        size_bytes: how much has been written.
        kept_bytes: how much memory it has.
    """

    def __init__(self, name: str, allow: Callable[[int], None]) -> None:
        self._allow = allow
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

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append; how many bytes.

        Raises:
            OverLimitError: that needs more memory than is allowed.
        """
        view = memoryview(data).cast("B")
        end = self.size_bytes + view.nbytes
        self._allow(end - self.kept_bytes)
        if end > self._capacity_bytes:
            self._grow(end)
        self._map[self.size_bytes : end] = view
        self.size_bytes = end
        self.kept_bytes = max(self.kept_bytes, end)
        return view.nbytes

    def flush(self) -> None:
        """Nothing is ever held back."""

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


def is_image(path: Path) -> bool:
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
