"""Storage on a local disk, and storage in this process's memory.

fsspec writes a local file in place, so that a reader or a crash may see a part of it. Here an
object is written atomically and synced to disk.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import tempfile
import threading
from collections.abc import Collection, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from trial_core.checkpoint.storage.base import (
    PROBES,
    DeletedFiles,
    RangeRead,
    Storage,
    StoredObject,
)
from trial_core.checkpoint.storage.local_files import (
    TEMPORARY_NAME,
    atomic_file,
    read_at,
    sha256_of,
)
from trial_core.checkpoint.storage.parallel import CancelSignal
from trial_core.errors import CheckpointDamaged, StorageError

logger = logging.getLogger(__name__)

_DEEPEST = 200
"""Of a storage's folders. More would end in a RecursionError; no key of a run has so many."""

# fsspec's memory:// is one file system for the whole process.
_memory_lock = threading.Lock()


class LocalStorage(Storage):
    """A folder on this machine. Links in it are followed to read. Nothing is written or deleted
    behind one: a writer of the storage can make one to any folder of this user."""

    def read_into(
        self, key: str, start: int, view: memoryview, stop: CancelSignal, version: str | None = None
    ) -> RangeRead:
        """As `Storage.read_into`. The version is made of inode, modification time and size."""
        with (
            self._errors.translated(f"read {key} in"),
            open(self._path(key), "rb", buffering=0, opener=_open_regular) as file,
        ):
            size_bytes = read_at(file.fileno(), start, view)
            status = os.fstat(file.fileno())
        return RangeRead(size_bytes, f"{status.st_ino}:{status.st_mtime_ns}:{status.st_size}")

    def objects(self, folder: str) -> dict[str, StoredObject]:
        """As `Storage.objects`. A folder that cannot be read is an error, not an empty one; so is a
        link that leads nowhere (its disk is not mounted), or back.

        Else a sweep would take files for orphans whose manifest is behind a link. Links to folders
        are followed, at any depth.
        """
        found: dict[str, StoredObject] = {}
        with self._errors.translated(f"list {folder} in"):
            for path, status in _files_below(self._path(folder)):
                modified_at = datetime.fromtimestamp(status.st_mtime, timezone.utc)
                key = path.relative_to(self._root or "/").as_posix()
                found[key] = StoredObject(status.st_size, modified_at)
        return found

    def is_linked(self, key: str) -> bool:
        path, root = Path(self._path(key)), Path(self._root or "/")
        return any(each.is_symlink() for each in (path, *path.parents) if root in each.parents)

    def clear(self, folder: str, keep: Collection[str] = ()) -> DeletedFiles:
        """As `Storage.clear`; deletes the empty folders as well. Of a link to a folder, only the
        link is deleted: the files are elsewhere."""
        self._require_no_link(self._path(folder))
        with self._errors.translated(f"delete {folder} in", RecursionError):
            for link in _links_below(self._path(folder)):
                below = f"{link.relative_to(self._root or '/').as_posix()}/"
                if any(key.startswith(below) for key in keep):
                    raise StorageError(
                        f"{link} is a symbolic link, behind which are files that are still needed; "
                        "put the folder in its place, then delete again"
                    )
                logger.warning(
                    "deleted the link %s alone: delete the files in %s yourself",
                    link, os.readlink(link),
                )  # fmt: skip
                link.unlink()
        deleted = super().clear(folder, keep)
        for parent, _, _ in os.walk(self._path(folder), topdown=False):
            with contextlib.suppress(OSError):  # another process has just written a file there
                os.rmdir(parent)
        return deleted

    def delete(self, key: str) -> None:
        self._require_no_link(self._path(key))
        super().delete(key)

    def abort_uploads(self, folder: str, before: datetime | None = None) -> int:
        """As `Storage.abort_uploads`: deletes temporary files."""
        unfinished = [
            key
            for key, file in self.objects(folder).items()
            if TEMPORARY_NAME.search(key)
            and (before is None or (file.modified_at is not None and file.modified_at < before))
        ]
        for key in unfinished:
            self.remove(key)
        return len(unfinished)

    def _create_only_problem(self) -> str | None:
        """As `Storage._create_only_problem`: `create` gives a complete file its name by a link."""
        folder = Path(self._path(PROBES))
        self._require_no_link(str(folder / "file"))
        with self._errors.translated("write to"):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as probe:
                file = Path(probe, "file")
                file.touch()
                try:
                    os.link(file, Path(probe, "link"))
                except OSError as error:
                    return f"its file system has no hard links [{error}]"
        return None

    def _is_absence(self, path: str, error: FileNotFoundError) -> bool:
        """As `Storage._is_absence`; raises if a link on the way leads nowhere: a claim that is not
        seen would let a prune delete the uploads of its run."""
        _require_no_dangling_link(Path(path))
        return True

    def _get(self, path: str, size_bytes: int) -> bytes:
        with open(path, "rb", opener=_open_regular) as file:  # a read allocates the requested size
            return file.read(min(os.fstat(file.fileno()).st_size, size_bytes))

    def _create(self, path: str, data: bytes) -> None:
        self._require_no_link(path)
        with atomic_file(Path(path), is_durable=True, is_new=True) as file:
            file.write(data)

    def _put_small(self, path: str, data: bytes, **options: Any) -> None:
        self._require_no_link(path)
        with atomic_file(Path(path), is_durable=True) as file:
            file.write(data)

    def _store_file(self, source: Path, size_bytes: int, key: str, stop: CancelSignal) -> str:
        self._require_no_link(self._path(key))
        # One pass over the source: the digest is that of the bytes written.
        with (
            open(source, "rb") as file,
            atomic_file(Path(self._path(key)), is_durable=True) as copy,
        ):
            return sha256_of(file, size_bytes, stop, copy)

    def _require_no_link(self, path: str) -> None:
        """Raise StorageError if a folder between the storage's and this object is a link."""
        for folder in Path(path).parents:
            if folder == Path(self._root or "/"):
                return
            if folder.is_symlink():
                raise StorageError(
                    f"{folder} is a symbolic link, and nothing is written or deleted behind one: "
                    "put the folder itself in its place (a mount is one)"
                )


class MemoryStorage(Storage):
    """This process's memory: for tests and trials."""

    is_process_local = True

    def _create_only_problem(self) -> str | None:
        return None

    def _create(self, path: str, data: bytes) -> None:
        with _memory_lock:
            super()._create(path, data)


def _open_regular(path: str, flags: int) -> int:
    """The opener of a stored file. A pipe or a device would hang its reader, or have no end."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # open itself refuses a folder
        os.close(descriptor)
        raise CheckpointDamaged(
            f"{path} is a pipe or a device; expected a file: delete it, or use another checkpoint"
        )
    return descriptor


def _files_below(
    folder: str, above: frozenset[tuple[int, int]] = frozenset()
) -> Iterator[tuple[Path, os.stat_result]]:
    """The files in a folder and below it. `above`: device and inode of each folder on the way."""
    try:
        status = os.stat(folder)
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        _require_no_dangling_link(Path(folder))
        return
    if (own := (status.st_dev, status.st_ino)) in above:
        raise OSError(errno.ELOOP, "a symbolic link leads back to a folder above it", folder)
    if len(above) > _DEEPEST:
        raise OSError(errno.ELOOP, "folders are too deep: delete the topmost", f"{folder[:200]}…")
    for entry in entries:
        if entry.is_dir():
            yield from _files_below(entry.path, above | {own})
            continue
        try:
            yield Path(entry.path), os.stat(entry.path)
        except FileNotFoundError:  # deleted since it was listed
            _require_no_dangling_link(Path(entry.path))


def _require_no_dangling_link(path: Path) -> None:
    for each in (path, *path.parents):
        if each.is_symlink() and not each.exists():
            what = "a symbolic link leads nowhere: mount its disk, or delete the link"
            raise OSError(errno.ENOENT, what, str(each))


def _links_below(folder: str) -> Iterator[Path]:
    """The links to folders at a path or below it."""
    if os.path.islink(folder):
        yield Path(folder)
        return
    for parent, folders, _ in os.walk(folder):
        yield from (path for name in folders if (path := Path(parent, name)).is_symlink())
