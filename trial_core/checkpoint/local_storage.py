"""The storages that fsspec's own verbs do not keep safe: a local disk, and this process's memory.

fsspec writes a local file in place, so a reader or a crash may find half of it. Here a file
appears under its name whole, and has reached the disk by then.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from trial_core.checkpoint.parallel import StopSignal
from trial_core.checkpoint.storage import READ_BYTES, Storage, StorageSpec, connect, is_local

_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)

# The memory that memory:// stands for is one for the whole process, and so is the lock.
_memory_lock = threading.Lock()


def open_storage(url: str, options: dict[str, Any] | None = None) -> Storage:
    """The storage under a fsspec URL, or a plain path. Sends no request yet.

    Raises:
        StorageError: the URL is none, or a package for it is not installed.
    """
    options = dict(options or {})
    fs, root = connect(url, options)
    if is_local(fs):
        return LocalStorage(StorageSpec(f"file://{root}", options), fs, root)
    storage = Storage(StorageSpec(url, options), fs, root)
    return MemoryStorage(storage.spec, fs, root) if storage.is_process_local else storage


class LocalStorage(Storage):
    """A folder of this machine."""

    def upload(self, source: Path, key: str, stop: StopSignal) -> tuple[int, str]:
        """As `Storage.upload`, in one pass: the digest is that of the bytes written."""
        digest, size_bytes = hashlib.sha256(), 0
        with (
            self._explainer.explaining(f"upload {source} to {key} in"),
            open(source, "rb") as file,
            whole_file(Path(self._path(key)), is_durable=True) as copy,
        ):
            while chunk := file.read(READ_BYTES):
                stop.check()
                digest.update(chunk)
                copy.write(chunk)
                size_bytes += len(chunk)
        return size_bytes, f"sha256:{digest.hexdigest()}"

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

    def _create(self, path: str, data: bytes) -> None:
        with whole_file(Path(path), is_durable=True, is_new=True) as file:
            file.write(data)


class MemoryStorage(Storage):
    """This process's memory: for tests, and for trying things out."""

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


def _link(temporary: Path, path: Path) -> None:
    """Give the file its name, unless the name is taken: in one step where links exist."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        # Still exclusive. A crash half-way leaves a file that does not parse, and so is not read.
        with open(path, "xb") as file:
            file.write(temporary.read_bytes())
            file.flush()
            os.fsync(file.fileno())


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
