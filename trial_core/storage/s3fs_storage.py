"""S3 through the client of s3fs, with transfers of our own.

A file is uploaded in parts from the buffer pool and hashed while it is read, off the event loop.
It is read in ranges, which must all come from one version of the object.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import logging
import os
import zlib
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trial_core.storage.base import RangeRead, Storage, StorageSpec, StoredObject
from trial_core.storage.buffer_pool import piece_bytes
from trial_core.storage.event_loop import LoopTask
from trial_core.storage.local_files import changed_during_upload, read_at
from trial_core.storage.parallel import CancelSignal
from trial_core.storage.s3_multipart import multipart_upload
from trial_core.storage.s3_requests import S3Requests

T = TypeVar("T")

_logger = logging.getLogger(__name__)

_NOT_ALLOWED = (errno.EPERM, errno.EACCES, errno.ENOSYS)


class S3Storage(Storage):
    """A bucket, or a folder in it."""

    def __init__(self, spec: StorageSpec, fs: Any, root: str, uses_checksums: bool) -> None:
        """As `Storage`.

        Args:
            uses_checksums: see `S3Requests`.
        """
        super().__init__(spec, fs, root)
        self._bucket, self._prefix, _ = fs.split_path(self._root)
        self._requests = S3Requests(fs, self._bucket, uses_checksums)
        self._has_warned = False

    def read_into(
        self, key: str, start: int, view: memoryview, stop: CancelSignal, version: str | None = None
    ) -> RangeRead:
        """As `Storage.read_into`. The version is the object's version id, or its ETag."""
        with self._errors.translated(f"read {key} in"):
            get = self._requests.get_range(self._key(key), start, view, version)
            return LoopTask(self._requests.loop, get).result(stop)

    def unfinished_uploads(self, folder: str) -> list[tuple[str, StoredObject]]:
        """As `Storage.unfinished_uploads`: multipart uploads."""
        with self._errors.translated(f"list unfinished uploads to {folder} in"):
            found = self._if_allowed(self._requests.unfinished(self._key(f"{folder}/")), [])
        start = len(self._key(""))
        return [(each.key[start:], StoredObject(0, each.begun_at)) for each in found]

    def abort_uploads(self, folder: str) -> int:
        """As `Storage.abort_uploads`: aborts multipart uploads."""
        with self._errors.translated(f"abort unfinished uploads to {folder} in"):
            return self._if_allowed(self._requests.abort_uploads(self._key(f"{folder}/")), 0)

    def _if_allowed(self, request: Coroutine[Any, Any, T], otherwise: T) -> T:
        """The answer of a request about unfinished uploads, which needs further rights."""
        try:
            return LoopTask(self._requests.loop, request).result(CancelSignal())
        except OSError as error:
            if error.errno not in _NOT_ALLOWED and not isinstance(error, PermissionError):
                raise
            self._warn_once(error)
            return otherwise

    def _warn_once(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "unfinished uploads of killed processes in %s cannot be listed and aborted, and "
                "may take space: allow s3:ListBucketMultipartUploads and s3:AbortMultipartUpload, "
                "or add a lifecycle rule to the bucket that aborts them [%s]",
                self.url, self._errors.redact(f"{type(error).__name__}: {error}"),
            )  # fmt: skip

    def _key(self, key: str) -> str:
        """The full key in the bucket."""
        return f"{self._prefix}/{key}".lstrip("/")

    def _put_small(self, path: str, data: bytes, **options: Any) -> None:
        # Every server compares this digest with the bytes that arrive.
        md5 = hashlib.md5(data, usedforsecurity=False).digest()
        super()._put_small(path, data, ContentMD5=base64.b64encode(md5).decode(), **options)

    def _store_file(self, source: Path, size_bytes: int, key: str, stop: CancelSignal) -> str:
        with open(source, "rb", buffering=0) as file, self.buffers.in_use():
            if size_bytes <= piece_bytes(size_bytes):
                return self._store_whole(source, file.fileno(), size_bytes, key, stop)
            return self._store_parts(source, file.fileno(), size_bytes, key, stop)

    def _store_parts(
        self, source: Path, file: int, size_bytes: int, key: str, stop: CancelSignal
    ) -> str:
        digest, step = hashlib.sha256(), piece_bytes(size_bytes)
        with multipart_upload(self._requests, self._key(key), stop, self._errors) as send:
            for start in range(0, size_bytes, step):
                buffer = self.buffers.acquire(step, stop)
                release = partial(self.buffers.release, buffer)
                try:
                    view = memoryview(buffer)[: min(step, size_bytes - start)]
                    if read_at(file, start, view) != len(view):
                        raise changed_during_upload(source)
                    digest.update(view)
                    crc = self._crc(view)
                except BaseException:
                    release()
                    raise
                send(view, crc, release)
        return digest.hexdigest()

    def _store_whole(
        self, source: Path, file: int, size_bytes: int, key: str, stop: CancelSignal
    ) -> str:
        buffer = self.buffers.acquire(size_bytes, stop)  # waits its turn; accounts for the memory
        release = partial(self.buffers.release, buffer)
        try:
            # Not into the buffer: an abandoned connection may still send from the data.
            data = memoryview(os.pread(file, size_bytes, 0))
            if len(data) != size_bytes:
                raise changed_during_upload(source)
            crc = self._crc(data)
        except BaseException:
            release()
            raise
        put = self._requests.put(self._key(key), data, crc)
        LoopTask(self._requests.loop, put, release).result(stop)
        return hashlib.sha256(data).hexdigest()

    def _crc(self, data: memoryview) -> int | None:
        return zlib.crc32(data) if self._requests.uses_checksums else None
