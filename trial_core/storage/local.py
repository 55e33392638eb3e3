"""The storages that fsspec's own verbs do not keep safe: a local disk, and this process's memory.

fsspec writes a local file in place, so a reader or a crash may find half of it. Here a file
appears under its name whole, and has reached the disk by then.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from trial_core.checkpoint import layout
from trial_core.storage.base import Storage
from trial_core.storage.chunks import DeletedFiles, RangeRead, chunks
from trial_core.storage.parallel import StopSignal

_TEMPORARY = re.compile(r"(^|/)\.[0-9a-f]{32}\.part$")
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)

# The memory that memory:// stands for is one for the whole process, and so is the lock.
_memory_lock = threading.Lock()


class LocalStorage(Storage):
    """A folder of this machine."""

    def read_into(
        self, key: str, start: int, view: memoryview, stop: StopSignal, version: str | None = None
    ) -> RangeRead:
        """As `Storage.read_into`; the version tells any other file of that name apart."""
        done = 0
        with (
            self._explainer.explaining(f"read {key} in"),
            open(self._path(key), "rb", buffering=0) as file,
        ):
            while done < len(view) and (
                more := os.preadv(file.fileno(), [view[done:]], start + done)
            ):
                done += more
            status = os.fstat(file.fileno())
        return RangeRead(done, f"{status.st_ino}:{status.st_mtime_ns}:{status.st_size}")

    def sizes(self, folder: str) -> dict[str, int]:
        """As `Storage.sizes`. fsspec's own walk takes a folder that cannot be read for empty."""
        found: dict[str, int] = {}
        with self._explainer.explaining(f"list {folder} in"):
            for parent, _, names in os.walk(self._path(folder), onerror=_raise_unless_gone):
                for name in names:
                    path = Path(parent, name)
                    try:
                        found[path.relative_to(self._root or "/").as_posix()] = path.stat().st_size
                    except FileNotFoundError:
                        continue  # gone since it was listed
        return found

    def clear(self, folder: str) -> DeletedFiles:
        """As `Storage.clear`, and the folder itself."""
        cleared = super().clear(folder)
        for parent, _, _ in os.walk(self._path(folder), topdown=False):
            with contextlib.suppress(OSError):  # somebody has just put something in
                os.rmdir(parent)
        return cleared

    def end_uploads(self, folder: str) -> int:
        """As `Storage.end_uploads`: files that never got their name."""
        begun = [key for key in self.sizes(folder) if _TEMPORARY.search(key)]
        for key in begun:
            self.remove(key)
        return len(begun)

    def _probe(self) -> bool:
        """Whether there are hard links. What stands in for them (see `_link`) is a lock of the
        kernel's, which on some network file systems other machines do not see."""
        folder = Path(self._path(layout.PROBES))
        with self._explainer.explaining("write to"):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".", suffix=".part") as file:
                name = Path(f"{file.name}.link")
                try:
                    os.link(file.name, name)
                except OSError as error:
                    if error.errno not in _NO_HARD_LINKS:
                        raise
                    return False
                name.unlink()
        return True

    def _create(self, path: str, data: bytes) -> None:
        with whole_file(Path(path), is_durable=True, is_new=True) as file:
            file.write(data)

    def _put_small(self, path: str, data: bytes, **how: Any) -> None:
        with whole_file(Path(path), is_durable=True) as file:
            file.write(data)

    def _store_file(self, source: Path, size_bytes: int, key: str, stop: StopSignal) -> str:
        """In one pass: the digest is that of the bytes written."""
        digest = hashlib.sha256()
        with (
            open(source, "rb") as file,
            whole_file(Path(self._path(key)), is_durable=True) as copy,
        ):
            for chunk in chunks(file, size_bytes):
                stop.check()
                digest.update(chunk)
                copy.write(chunk)
        return digest.hexdigest()


class MemoryStorage(Storage):
    """This process's memory: for tests, and for trying things out."""

    def _probe(self) -> bool:
        return True

    def _create(self, path: str, data: bytes) -> None:
        with _memory_lock:
            super()._create(path, data)


@contextmanager
def whole_file(path: Path, *, is_durable: bool, is_new: bool = False) -> Iterator[BinaryIO]:
    """A file to write, which appears under its name when the block has ended well, else never.

    Args:
        is_durable: whether it must have reached the disk by then.
        is_new: whether the name must be free.

    Raises:
        FileExistsError: it must, and is not.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{uuid.uuid4().hex}.part")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        if is_new:
            _link(temporary, path)
        else:
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if is_durable:
        _sync_folder(path.parent)


class PartFile:
    """A file that is written in any order, and appears under its name when it is kept."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._temporary = path.with_name(f".{uuid.uuid4().hex}.part")
        self._file = open(self._temporary, "xb", buffering=0)  # noqa: SIM115  # see `keep`, `drop`

    def write_at(self, view: memoryview, offset: int) -> None:
        """Write bytes to their place. Several threads may."""
        while view:
            done = os.pwrite(self._file.fileno(), view, offset)
            view, offset = view[done:], offset + done

    def keep(self) -> None:
        """Give the file its name."""
        self._file.close()
        os.replace(self._temporary, self._path)

    def drop(self) -> None:
        """Leave nothing of it."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def _link(temporary: Path, path: Path) -> None:
    """Give the file its name, unless the name is taken: whole, and in one step."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        # An exclusive open would show others a file that is not written yet.
        with _locked(path.parent):
            if path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
            os.replace(temporary, path)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Alone among those who lock the folder: processes, and threads of one. It ends with them."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, and the folder's own: it may be new."""
    for each in (folder, folder.parent):
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
