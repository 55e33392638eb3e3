"""Local files: reads in bounded pieces, and writes that are atomic.

A written file appears under its name complete or not at all: its bytes go to a temporary file in
the same folder, which is renamed at the end.
"""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

from trial_core.checkpoint.storage.parallel import CancelSignal
from trial_core.errors import CheckpointError

READ_BYTES = 4 * 2**20
"""The most of a local file that one thread holds in memory."""

TEMPORARY_NAME = re.compile(r"(^|/)\.[0-9a-f]{32}\.part$")
"""Matches the paths of temporary files, which remain only when a process was killed."""


def sha256_of(
    file: BinaryIO, size_bytes: int, stop: CancelSignal, copy: IO[bytes] | None = None
) -> str:
    """The SHA-256 of the next `size_bytes` of an open file, as hexadecimal digits. `copy` also gets
    the bytes."""
    digest, left = hashlib.sha256(), size_bytes
    while chunk := file.read(min(READ_BYTES, left)):
        stop.check()
        digest.update(chunk)
        if copy is not None:
            copy.write(chunk)
        left -= len(chunk)
    return digest.hexdigest()


def local_digest(path: Path, size_bytes: int, stop: CancelSignal) -> str:
    """The ``sha256:…`` digest of a file's first `size_bytes`."""
    with open(path, "rb") as file:
        return f"sha256:{sha256_of(file, size_bytes, stop)}"


def read_at(descriptor: int, offset: int, view: memoryview) -> int:
    """Fill `view` from `offset` on; return the bytes read, fewer where the file ends."""
    done = 0
    while done < len(view) and (more := os.preadv(descriptor, [view[done:]], offset + done)):
        done += more
    return done


def changed_during_upload(source: Path) -> CheckpointError:
    """The error for a file that was written to while it was uploaded."""
    return CheckpointError(
        f"{source} changed while it was uploaded: the trial's save must finish writing before it "
        "returns"
    )


def temporary_beside(path: Path) -> Path:
    """A new name in the same folder, so that a rename to `path` is atomic."""
    return path.with_name(f".{uuid.uuid4().hex}.part")


@contextmanager
def atomic_file(path: Path, *, is_durable: bool, is_new: bool = False) -> Iterator[BinaryIO]:
    """A file to write; it appears under its name when the block ends without an error, and, if
    `is_durable`, is synced to disk with its folder. `is_new`: raise FileExistsError if the name is
    taken."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(path)
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        if is_new:
            os.link(temporary, path)
        else:
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if is_durable:
        _sync_folder(path.parent)


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file's content: readers see the old or the new one, whole. Not synced to disk."""
    with atomic_file(path, is_durable=False) as file:
        file.write(data)


class PartFile:
    """An atomic file whose bytes are written in any order."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._temporary = temporary_beside(path)
        self._file = open(self._temporary, "xb", buffering=0)  # noqa: SIM115  # see `keep`, `drop`

    def write_at(self, view: memoryview, offset: int) -> None:
        """Write bytes at an offset. Safe to call from several threads."""
        while view:
            done = os.pwrite(self._file.fileno(), view, offset)
            view, offset = view[done:], offset + done

    def keep(self) -> None:
        """Close the file and give it its name."""
        self._file.close()
        os.replace(self._temporary, self._path)

    def drop(self) -> None:
        """Close the file and delete it."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk, and the folder's own name, which may be new: but not in a
    parent that this user may not read, such as that of all users' folders."""
    for each in (folder, folder.parent):
        try:
            descriptor = os.open(each, os.O_RDONLY)
        except PermissionError:
            if each == folder:  # a file just renamed into it would not be durable
                raise
            continue
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
