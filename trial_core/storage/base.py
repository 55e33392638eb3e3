"""A storage: named bytes under a URL, in the few verbs that checkpoints need.

Over fsspec, so ``file://``, ``memory://``, ``s3://``, ``gs://``, ``az://`` and whatever else it
knows. Keys are POSIX paths relative to the URL. Whatever goes wrong is a `StorageError`.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from trial_core.errors import StorageError
from trial_core.storage import probing
from trial_core.storage.buffer_pool import Window
from trial_core.storage.chunks import DELETED_IN_VAIN, DeletedFiles, RangeRead, changed, chunks
from trial_core.storage.parallel import StopSignal, in_parallel
from trial_core.storage.storage_errors import Explainer, service_code, storage_exceptions

# AWS's answer to two conditional writes at once is that neither counts: "try again".
_TRY_AGAIN_CODES = ("ConditionalRequestConflict", "OperationAborted")
_CREATE_ATTEMPTS = 5
_DELETE_THREADS = 8
_SHOWN = 3


class StorageSpec(msgspec.Struct, frozen=True):
    """Where a storage is: plain data, which travels from the driver to the ranks.

    Attributes:
        url: fsspec URL of the root, absolute.
        options: for the file system. May hold credentials, so it is not shown.
    """

    url: str
    options: dict[str, Any] = {}

    def __repr__(self) -> str:
        shown = Explainer(self.url, self.options).url
        return f"StorageSpec(url={shown!r}, options=<{len(self.options)} not shown>)"


class Storage:
    """Named bytes below a URL. Safe to use from several threads.

    Attributes:
        url: the root as shown to people: without credentials.
        window: bounds the memory of all that is under way.
    """

    def __init__(self, spec: StorageSpec, fs: Any, root: str) -> None:
        self.spec = spec
        self._fs = fs
        self._root = root.rstrip("/")
        self._explainer = Explainer(spec.url, spec.options)
        self.url = self._explainer.url.rstrip("/")
        self.window = Window()
        self._has_conditional_writes: bool | None = None

    @property
    def is_process_local(self) -> bool:
        """Whether what is stored is seen by this process alone."""
        return isinstance(self._fs, MemoryFileSystem)

    def read(self, key: str) -> bytes | None:
        """All bytes of a small object, None where there is none."""
        with self._explainer.explaining(f"read {key} in"):
            return self._read(self._path(key))

    def read_range(self, key: str, start: int, end: int) -> bytes:
        """The bytes from `start` up to, not including, `end`; fewer where the object ends."""
        with self._explainer.explaining(f"read {key} in"):
            data: bytes = self._fs.cat_file(self._path(key), start=start, end=end)
            return data

    def create(self, key: str, data: bytes) -> None:
        """Store a small object under a key that must be free. Of several writers one succeeds.

        Succeeds as well where these very bytes are there already: the reply to an earlier attempt
        was lost, and it had done it. Where there are no conditional writes (see
        `has_conditional_writes`), two writers that come at the same moment are not told apart.

        Raises:
            FileExistsError: other bytes are there.
        """
        path = self._path(key)
        with self._explainer.explaining(f"write {key} in"):
            existing = self._create_or_read(path, data)
        if existing is not None and existing != data:
            raise FileExistsError(f"{key} exists in {self.url}")

    def write(self, key: str, data: bytes) -> None:
        """Store a small object, whether or not the key is free."""
        with self._explainer.explaining(f"write {key} in"):
            self._put_small(self._path(key), data)

    def read_into(
        self, key: str, start: int, view: memoryview, stop: StopSignal, version: str | None = None
    ) -> RangeRead:
        """Read the bytes from `start` on into `view`, as many as it takes.

        Args:
            version: of an earlier piece. A storage that can then reads that very state of the
                object; others read what is there, so compare what the piece says.
        """
        data = self.read_range(key, start, start + len(view))
        view[: len(data)] = data
        return RangeRead(len(data), None)

    def upload(
        self, source: Path, key: str, stop: StopSignal, size_bytes: int | None = None
    ) -> tuple[int, str]:
        """Store a file, whether or not the key is free; return its size and ``sha256:…`` digest.

        However this ends, nothing of the file is left but the object, whole, or nothing at all.

        Args:
            size_bytes: how much of the file counts, from its start; None: all.

        Raises:
            CheckpointError: the file changed meanwhile, or has less than that.
        """
        with self._explainer.explaining(f"upload {source} to {key} in"):
            before = os.stat(source)
            wanted = before.st_size if size_bytes is None else size_bytes
            if before.st_size < wanted:
                raise changed(source)
            digest = self._store_file(source, wanted, key, stop)
            after = os.stat(source)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise changed(source)
        return wanted, f"sha256:{digest}"

    def sizes(self, folder: str) -> dict[str, int]:
        """Keys and sizes of all objects below a folder; empty where there is no such folder."""
        with self._explainer.explaining(f"list {folder} in"):
            # Another process may have written since: no listing may come from a cache.
            self._fs.invalidate_cache()
            found = self._find(self._path(folder))
        prefix = self._root.lstrip("/")
        keys = {name.lstrip("/")[len(prefix) :].lstrip("/"): name for name in found}
        return {
            key: int(found[name]["size"])
            for key, name in keys.items()
            if key.startswith(f"{folder}/")
        }

    def delete(self, key: str) -> None:
        """Delete an object."""
        with self._explainer.explaining(f"delete {key} in"):
            self._fs.rm_file(self._path(key))

    def remove(self, key: str) -> None:
        """Delete an object, if it is there; somebody else may be doing the same."""
        try:
            self.delete(key)
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError) or self.read(key) is None:
                return
            raise

    def clear(self, folder: str) -> DeletedFiles:
        """Delete all objects below a folder, and what unfinished uploads have left there.

        Raises:
            StorageError: the storage failed, or some are still there: which.
        """
        uploads = self.end_uploads(folder)
        there = self.sizes(folder)
        in_parallel(lambda key, _: self.remove(key), there, _DELETE_THREADS)
        if there and (left := sorted(self.sizes(folder))):
            raise StorageError(
                f"{len(left)} of {len(there)} objects in {self.url}/{folder} are still there after "
                f"they were deleted ({', '.join(left[:_SHOWN])}): {DELETED_IN_VAIN}"
            )
        return DeletedFiles(len(there), sum(there.values()), uploads)

    def end_uploads(self, folder: str) -> int:
        """Drop what unfinished uploads have left below a folder; how many. Nobody may be uploading
        there: that upload would fail.

        Storages that keep no such things, or drop them by themselves, have none.
        """
        return 0

    def has_conditional_writes(self) -> bool:
        """Whether of several who `create` the same key at the same moment one succeeds.

        It is tried once, by a few requests (see `probing`).
        """
        if self._has_conditional_writes is None:
            self._has_conditional_writes = self._probe()
        return self._has_conditional_writes

    def try_out(self, key: str) -> None:
        """Write, read back and delete an object; the first use of a storage shows what is amiss.

        Raises:
            StorageError: it is not usable, and why.
        """
        # From the file system's own set-up these come where the options or the URL are wrong.
        with self._explainer.explaining("use", TypeError, ValueError, KeyError):
            self.write(key, key.encode())
        probing.read_back(self, key, key.encode())
        self.delete(key)

    def _probe(self) -> bool:
        # Whatever else fsspec knows looks whether the key is free, and then writes: alone it passes
        # the probe as well.
        return probing.sends_conditions(self._fs) and probing.keeps_what_is_there(self)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _find(self, path: str) -> dict[str, dict[str, Any]]:
        """What fsspec says of every object below a folder, by its full name."""
        if not isinstance(self._fs, AsyncFileSystem):
            return dict(self._walk(path))
        try:
            found: dict[str, dict[str, Any]] = self._fs.find(path, detail=True)
        except FileNotFoundError as error:
            if service_code(error) == "NoSuchBucket":
                raise
            return {}
        return found

    def _walk(self, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """As `_find`. fsspec's own walk takes a folder that cannot be listed for an empty one."""
        try:
            entries = self._fs.ls(path, detail=True)
        except FileNotFoundError:
            return  # there is none, or none any more
        for entry in entries:
            name = entry["name"].rstrip("/")
            if entry["type"] == "directory" and name.lstrip("/") != path.strip("/"):
                yield from self._walk(name)
            elif entry["type"] != "directory":
                yield name, entry

    def _read(self, path: str) -> bytes | None:
        try:
            data: bytes = self._fs.cat_file(path)
        except FileNotFoundError as error:
            if service_code(error) == "NoSuchBucket":
                raise
            return None
        return data

    def _create_or_read(self, path: str, data: bytes) -> bytes | None:
        """None when created; else the bytes that were there."""
        for attempt in range(_CREATE_ATTEMPTS):
            try:
                self._create(path, data)
                return None
            except storage_exceptions() as error:
                # Whatever the error: what is there now tells how it went. A lost reply, a retry
                # inside the client and a lost race look alike from here, and S3 servers do not
                # even agree on how to say that the key is taken.
                existing = self._read(path)
                last = attempt == _CREATE_ATTEMPTS - 1
                if existing is None and (last or service_code(error) not in _TRY_AGAIN_CODES):
                    raise
                if existing is not None and not _is_half(existing, data):
                    return existing
                if existing is not None:
                    self._put_small(path, data)
                    return None
            time.sleep(0.1 * 2**attempt)
        return None

    def _create(self, path: str, data: bytes) -> None:
        # One small PUT: over multipart uploads some servers ignore the condition.
        self._put_small(path, data, mode="create")

    def _put_small(self, path: str, data: bytes, **how: Any) -> None:
        self._make_folder_of(path)
        self._fs.pipe_file(path, data, **how)

    def _make_folder_of(self, path: str) -> None:
        """Object stores have no folders; on them, making one would make a bucket."""
        if not isinstance(self._fs, AsyncFileSystem):
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _store_file(self, source: Path, size_bytes: int, key: str, stop: StopSignal) -> str:
        """Store so many bytes of a file; their digest in hexadecimal digits."""
        digest = hashlib.sha256()
        with open(source, "rb") as file, tempfile.NamedTemporaryFile() as copy:
            is_longer = os.fstat(file.fileno()).st_size > size_bytes
            for chunk in chunks(file, size_bytes):
                stop.check()
                digest.update(chunk)
                if is_longer:
                    copy.write(chunk)
            copy.flush()
            self._fs.put_file(copy.name if is_longer else str(source), self._path(key))
        return digest.hexdigest()


def _is_half(existing: bytes, data: bytes) -> bool:
    """Whether that is how far a connection got that broke while `data` was written, as storages
    without a conditional write may leave it."""
    return len(existing) < len(data) and data.startswith(existing)
