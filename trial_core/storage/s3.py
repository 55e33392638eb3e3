"""S3 through s3fs's own client, where s3fs's own transfers are not enough.

Files go up in parts of a window that all files share, hashed while they are read, off the event
loop; and come back in ranges that must all be of one state of the object.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import logging
import os
import zlib
from functools import partial
from pathlib import Path
from typing import Any

from trial_core.storage.base import Storage, StorageSpec
from trial_core.storage.buffer_pool import piece_bytes, read_piece
from trial_core.storage.chunks import RangeRead, changed
from trial_core.storage.event_loop import LoopTask
from trial_core.storage.parallel import StopSignal
from trial_core.storage.s3_requests import S3Requests
from trial_core.storage.s3_upload import MultipartUpload

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
        self._has_said = False

    def read_into(
        self, key: str, start: int, view: memoryview, stop: StopSignal, version: str | None = None
    ) -> RangeRead:
        """As `Storage.read_into`; the version is the object's version id, or else its ETag."""
        with self._explainer.explaining(f"read {key} in"):
            get = self._requests.get_range(self._key(key), start, view, version)
            return LoopTask(self._requests.loop, get).result(stop)

    def end_uploads(self, folder: str) -> int:
        """As `Storage.end_uploads`: multipart uploads that were neither completed nor aborted."""
        with self._explainer.explaining(f"end unfinished uploads to {folder} in"):
            end = self._requests.end_uploads(self._key(f"{folder}/"))
            try:
                return LoopTask(self._requests.loop, end).result(StopSignal())
            except OSError as error:
                if error.errno not in _NOT_ALLOWED and not isinstance(error, PermissionError):
                    raise
                self._say_once_that_unfinished_uploads_stay(error)
                return 0

    def _say_once_that_unfinished_uploads_stay(self, error: Exception) -> None:
        if not self._has_said:
            self._has_said = True
            _logger.warning(
                "uploads that killed processes have left unfinished in %s cannot be listed and "
                "ended, and may take space: allow s3:ListBucketMultipartUploads and "
                "s3:AbortMultipartUpload, or let a lifecycle rule of the bucket end them [%s]",
                self.url, self._explainer.hide(f"{type(error).__name__}: {error}"),
            )  # fmt: skip

    def _key(self, key: str) -> str:
        """What S3 calls it."""
        return f"{self._prefix}/{key}".lstrip("/")

    def _put_small(self, path: str, data: bytes, **how: Any) -> None:
        # Every server compares this sum with what has arrived.
        md5 = hashlib.md5(data, usedforsecurity=False).digest()
        super()._put_small(path, data, ContentMD5=base64.b64encode(md5).decode(), **how)

    def _store_file(self, source: Path, size_bytes: int, key: str, stop: StopSignal) -> str:
        with open(source, "rb", buffering=0) as file, self.window.in_use():
            if size_bytes <= piece_bytes(size_bytes):
                return self._store_whole(source, file.fileno(), size_bytes, key, stop)
            return self._store_parts(source, file.fileno(), size_bytes, key, stop)

    def _store_parts(
        self, source: Path, file: int, size_bytes: int, key: str, stop: StopSignal
    ) -> str:
        digest, step = hashlib.sha256(), piece_bytes(size_bytes)
        with MultipartUpload(self._requests, self._key(key), stop, self._explainer) as upload:
            for start in range(0, size_bytes, step):
                buffer = self.window.take(step, stop)
                give_back = partial(self.window.give_back, buffer)
                try:
                    view = memoryview(buffer)[: min(step, size_bytes - start)]
                    if not read_piece(file, start, view):
                        raise changed(source)
                    digest.update(view)
                    crc = self._crc(view)
                except BaseException:
                    give_back()
                    raise
                upload.send(view, crc, give_back)
            upload.complete()
        return digest.hexdigest()

    def _store_whole(
        self, source: Path, file: int, size_bytes: int, key: str, stop: StopSignal
    ) -> str:
        buffer = self.window.take(size_bytes, stop)  # its turn, and its share of the memory
        give_back = partial(self.window.give_back, buffer)
        try:
            # Not in the buffer itself: a connection that was given up may go on sending from it.
            data = memoryview(os.pread(file, size_bytes, 0))
            if len(data) != size_bytes:
                raise changed(source)
            crc = self._crc(data)
        except BaseException:
            give_back()
            raise
        put = self._requests.put(self._key(key), data, crc)
        LoopTask(self._requests.loop, put, give_back).result(stop)
        return hashlib.sha256(data).hexdigest()

    def _crc(self, data: memoryview) -> int | None:
        return zlib.crc32(data) if self._requests.uses_checksums else None
