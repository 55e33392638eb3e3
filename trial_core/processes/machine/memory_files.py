"""Memory files: files in memory that a rank writes its shards to and uploads from.

A memory file (Linux: ``memfd_create``) replaces a file in the staging folder, where a link points
to it: any process of this user can read it by the link's path. Its memory is reused by the next
snapshot, because allocating costs more than filling. It is freed when the process ends, unless a
fork server keeps it for a restart (`trial_core.processes.slots.kept_memory`).
"""

from __future__ import annotations

import logging
import mmap
import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import IO

import psutil

logger = logging.getLogger(__name__)

GIB = 2**30

GROWTH_BYTES = 64 * 2**20
"""How much longer than needed a growing file is made; unwritten bytes take no memory."""

_SHORT_BYTES = 2**20
"""What is shorter is copied by one thread."""

_MEMORY_FILE_PATH = re.compile(r"/proc/\d+/fd/\d+")
CGROUPS = Path("/sys/fs/cgroup")
VMSTAT = Path("/proc/vmstat")
_CGROUP_VERSIONS = (
    ("memory.max", "memory.current", "memory.stat", ""),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_",
    ),
)
"""For cgroups 2 and 1: the files of limit, usage and statistics, and the sums' prefix there."""


Copy = Callable[[memoryview, memoryview], None]
"""Copies the bytes of the first one into the second one, which is as long."""


class MemoryFiles:
    """A rank's memory files, by their paths in the staging folder.

    Args:
        limit_bytes: the most memory of all files together; a file that does not fit is written to
            disk. 0 writes all files to disk. None: see `reserve_bytes`.
        reserve_bytes: without a limit, the memory of the machine that stays free.
        copy: copies into them by several threads, where there are some.
    """

    def __init__(
        self, limit_bytes: int | None, reserve_bytes: int = 0, copy: Copy | None = None
    ) -> None:
        self._limit_bytes = limit_bytes if hasattr(os, "memfd_create") else 0
        self._reserve_bytes = reserve_bytes
        self._copy = copy
        self._granted_bytes = 0
        self._files: dict[str, MemoryFile] = {}
        self._written: set[str] = set()
        self._reserved: dict[str, list[Callable[[], None]]] = {}
        self._is_rehearsal = False

    def begin(self, is_rehearsal: bool = False) -> None:
        """Begin a snapshot. The previous one must no longer be read.

        A rehearsal keeps the memory, not the files; data that do not fit are not written to disk.
        """
        self._written.clear()
        self._reserved.clear()
        self._is_rehearsal = is_rehearsal
        self._granted_bytes = 0

    def end(self) -> None:
        """End a snapshot: free the memory of files that it did not write."""
        for name in self._files.keys() - self._written:
            self._files.pop(name).close()

    def take_reserved(self) -> list[Callable[[], None]]:
        """What fills the room that this snapshot's files have reserved: see `SpillingFile`."""
        taken, self._reserved = self._reserved, {}
        return [fill for of_file in taken.values() for fill in of_file]

    def close(self) -> None:
        self._written.clear()
        self.end()

    def write(self, folder: Path, name: str, write: Callable[[IO[bytes]], None]) -> None:
        """Have `write` fill a file of a snapshot: in memory, or on disk if it does not fit."""
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        self._reserved.pop(name, None)
        on_disk = Path(os.devnull) if self._is_rehearsal else path
        if self._limit_bytes == 0:
            with open(on_disk, "wb") as file:
                write(file)
            return
        # Not setdefault: it would open another file each time.
        memory_file = self._files.get(name)
        if memory_file is None:
            memory_file = self._files[name] = MemoryFile(name, self._has_room, self._copy)
        memory_file.begin()
        with SpillingFile(memory_file, on_disk) as spilling:
            write(spilling)  # type: ignore[arg-type]  # as much of a file as torch.save needs
        if spilling.is_on_disk:
            self._files.pop(name).close()
            logger.warning(
                "%s does not fit into %s: it is staged on disk, which blocks training for longer; "
                "raise checkpointing.memory_gib_per_rank",
                name, self._describe_limit(),
            )  # fmt: skip
        else:
            memory_file.end()
            self._written.add(name)
            self._reserved[name] = spilling.reserved
            path.symlink_to(memory_file.path)

    def _has_room(self, more_bytes: int) -> bool:
        if more_bytes <= 0:
            return True
        needed_bytes = sum(file.kept_bytes for file in self._files.values()) + more_bytes
        if self._limit_bytes is not None:
            return needed_bytes <= self._limit_bytes
        if needed_bytes > self._granted_bytes:
            spare_bytes = free_bytes() - self._reserve_bytes
            if more_bytes > spare_bytes:
                return False
            # Some more, so that not every write has to look at the machine's memory.
            self._granted_bytes = needed_bytes + min(GROWTH_BYTES, spare_bytes - more_bytes)
        return True

    def _describe_limit(self) -> str:
        if self._limit_bytes is not None:
            return f"this rank's limit of {self._limit_bytes / GIB:.1f} GiB for snapshots in memory"
        return (
            f"the machine's free memory ({free_bytes() / GIB:.1f} GiB, of which "
            f"{self._reserve_bytes / GIB:.1f} GiB stay free)"
        )


class SpillingFile(AbstractContextManager["SpillingFile"]):
    """A file in memory that moves to disk when it no longer fits.

    A write that does not fit must not raise: `torch.save` would end its archive and raise another
    error. It must not be repeated either: it may be a slow copy from the accelerator.

    Attributes:
        reserved: each fills some room of the file. Call them before the file is read.
    """

    def __init__(self, memory_file: MemoryFile, path: Path) -> None:
        self._memory_file = memory_file
        self._path = path
        self._file: IO[bytes] | None = None
        self.reserved: list[Callable[[], None]] = []

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    @property
    def is_on_disk(self) -> bool:
        return self._file is not None

    def write(self, data: bytes | bytearray | memoryview) -> int:
        view = memoryview(data).cast("B")
        if self._file is None and not self._memory_file.append(view):
            self._move_to_disk()
        if self._file is not None:
            self._file.write(view)
        return view.nbytes

    def make_room(self, size_bytes: int) -> None:
        """Move to disk now if so much does not fit, not in the midst of it: that calls `fill`."""
        if self._file is None and not self._memory_file.has_room(size_bytes):
            self._move_to_disk()

    def reserve(self, size_bytes: int, fill: Callable[[memoryview], None]) -> bool:
        """Leave room for what `fill` writes later; without room in memory, return False."""
        start = None if self._file is not None else self._memory_file.reserve(size_bytes)
        if start is None:
            return False
        self.reserved.append(partial(self._memory_file.fill, start, size_bytes, fill))
        return True

    def flush(self) -> None:
        """Do nothing: the file is read only when it is complete."""

    def _move_to_disk(self) -> None:
        for fill in self.reserved:
            fill()
        self.reserved = []
        self._file = open(self._path, "wb")  # noqa: SIM115  # see `__exit__`
        self._memory_file.copy_to(self._file)


class MemoryFile:
    """An append-only file in memory; `has_room` says if so many more bytes may be allocated."""

    def __init__(
        self, name: str, has_room: Callable[[int], bool], copy: Copy | None = None
    ) -> None:
        self._has_room = has_room
        self._copy = copy
        self._fd = os.memfd_create(f"trialflow {name}"[:200], os.MFD_CLOEXEC)
        self._capacity_bytes = GROWTH_BYTES
        os.ftruncate(self._fd, self._capacity_bytes)
        self._map = mmap.mmap(self._fd, self._capacity_bytes)
        self.size_bytes = 0
        self.kept_bytes = 0
        """The memory allocated."""

    @property
    def path(self) -> str:
        """The path by which any of the user's processes can open it while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def begin(self) -> None:
        """Start to overwrite the file from its beginning."""
        os.ftruncate(self._fd, self._capacity_bytes)
        self.size_bytes = 0

    def append(self, view: memoryview) -> bool:
        """Append; without room, return False and write nothing."""
        if (start := self.skip(view.nbytes)) is None:
            return False
        if self._copy is None or view.nbytes < _SHORT_BYTES or view.readonly:
            self._map[start : self.size_bytes] = view
        else:
            self.fill(start, view.nbytes, partial(self._copy, view))
        return True

    def has_room(self, size_bytes: int) -> bool:
        """Return whether so many bytes more may be appended."""
        return self._has_room(self.size_bytes + size_bytes - self.kept_bytes)

    def reserve(self, size_bytes: int) -> int | None:
        """As `skip`, and take the memory now, so that it no longer counts as free."""
        kept_bytes = self.kept_bytes
        if (start := self.skip(size_bytes)) is None or self.size_bytes <= kept_bytes:
            return start
        begin = max(start, kept_bytes)
        try:
            os.posix_fallocate(self._fd, begin, self.size_bytes - begin)
        except OSError:  # no memory is left
            self.size_bytes, self.kept_bytes = start, kept_bytes
            return None
        return start

    def skip(self, size_bytes: int) -> int | None:
        """Leave room for so many bytes; return where it begins, or None if there is none."""
        start = self.size_bytes
        end = start + size_bytes
        if not self.has_room(size_bytes):
            return None
        if end > self._capacity_bytes:
            self._capacity_bytes = end + GROWTH_BYTES
            os.ftruncate(self._fd, self._capacity_bytes)
            self._map.close()
            self._map = mmap.mmap(self._fd, self._capacity_bytes)
        self.size_bytes = end
        self.kept_bytes = max(self.kept_bytes, end)
        return start

    def fill(self, start: int, size_bytes: int, fill: Callable[[memoryview], None]) -> None:
        """Have `fill` write to room that was left."""
        with memoryview(self._map) as whole, whole[start : start + size_bytes] as room:
            fill(room)

    def copy_to(self, file: IO[bytes]) -> None:
        with memoryview(self._map) as whole, whole[: self.size_bytes] as written:
            file.write(written)

    def end(self) -> None:
        """Truncate the file to the written bytes, which frees the rest of its memory."""
        os.ftruncate(self._fd, self.size_bytes)
        self.kept_bytes = self.size_bytes

    def close(self) -> None:
        """Free the memory once no process has the file open."""
        self._map.close()
        os.close(self._fd)


def is_memory_file(path: Path) -> bool:
    """True if `path` is a link to a memory file, of this process or another."""
    return path.is_symlink() and _MEMORY_FILE_PATH.fullmatch(os.readlink(path)) is not None


def take_memory_links(folder: Path) -> dict[str, str]:
    """Delete all links to memory files below a folder; return where each POSIX path there led."""
    links = [path for path in folder.rglob("*") if is_memory_file(path)]
    taken = {path.relative_to(folder).as_posix(): os.readlink(path) for path in links}
    for path in links:
        path.unlink()
    return taken


def free_bytes() -> int:
    """The memory that is still available on this machine, or in this container.

    Page cache counts as free. In a container, too, files that the run reads fill it, up to the
    container's limit, and the kernel drops it when memory is needed.
    """
    free = psutil.virtual_memory().available
    for limit, usage, statistics, prefix in _CGROUP_VERSIONS:
        try:
            used = int((CGROUPS / usage).read_text())
            lines = (CGROUPS / statistics).read_text().splitlines()
            # Not `file` or `cache`, which count files in memory, too.
            cached = [f"{prefix}{name}" for name in ("active_file", "inactive_file")]
            used -= sum(int(line.split()[1]) for line in lines if line.split()[0] in cached)
            free = min(free, int((CGROUPS / limit).read_text()) - used)
        except (OSError, ValueError):  # no such cgroup, or no limit ("max")
            continue
    return max(0, free)


def oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory since the machine's start.

    In a container, too, this is the number of the whole machine; 0 if it is unknown.
    """
    try:
        return int(re.findall(r"^oom_kill (\d+)$", VMSTAT.read_text(), re.MULTILINE)[0])
    except (OSError, IndexError):
        return 0
