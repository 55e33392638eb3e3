"""S3 with obstore for file contents: its requests run outside the Python interpreter.

s3fs sends all other requests. It moves the contents too if obstore does not support a setting.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import obstore
from obstore.exceptions import GenericError

from trial_core.errors import StorageError
from trial_core.storage import buffer_pool
from trial_core.storage.base import RangeRead, StorageSpec
from trial_core.storage.local_files import changed_during_upload, read_at
from trial_core.storage.obstore_options import UntranslatableError, s3_store
from trial_core.storage.parallel import CancelSignal
from trial_core.storage.s3_multipart import abort_uploads_to
from trial_core.storage.s3_requests import ETAG, VERSION
from trial_core.storage.s3fs_storage import S3Storage
from trial_core.storage.storage_errors import service_code

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import S3Store

_logger = logging.getLogger(__name__)

_STEP_BYTES = 2**20


class _Stores(NamedTuple):
    """Two stores for the bucket: their time limits differ."""

    reading: S3Store
    writing: S3Store


class ObstoreS3Storage(S3Storage):
    """A bucket, or a folder in it."""

    def __init__(
        self, spec: StorageSpec, fs: Any, root: str, uses_checksums: bool, *, is_required: bool
    ) -> None:
        """As `S3Storage`.

        Args:
            is_required: raise an error instead of using s3fs if obstore does not support a setting.
        """
        super().__init__(spec, fs, root, uses_checksums)
        self._is_required = is_required
        self._lock = Lock()
        self._opened: _Stores | None = None
        self._is_unsupported = False

    def read_into(
        self, key: str, start: int, view: memoryview, stop: CancelSignal, version: str | None = None
    ) -> RangeRead:
        """As `S3Storage.read_into`."""
        stores = self._stores()
        if stores is None:
            return super().read_into(key, start, view, stop, version)
        done = 0
        with self._errors.translated(f"read {key} in"):
            while done < len(view):
                before = done
                try:
                    reply = obstore.get(
                        stores.reading,
                        self._key(key),
                        options=_get_options(start + done, start + len(view), version),
                    )
                    seen = _version_of(reply.meta)
                    if version is not None and seen != version:
                        return RangeRead(done, seen)
                    version = seen
                    for chunk in reply.stream(_STEP_BYTES):
                        stop.check()
                        view[done : done + len(chunk)] = chunk
                        done += len(chunk)
                    break  # the object ends here
                except GenericError as error:
                    if service_code(error) == "InvalidRange":
                        break  # the object has become shorter
                    if done == before:  # obstore has retried already
                        raise
        return RangeRead(done, version)

    def _store_file(self, source: Path, size_bytes: int, key: str, stop: CancelSignal) -> str:
        stores = self._stores()
        step = buffer_pool.PIECE_BYTES
        if stores is None or buffer_pool.piece_bytes(size_bytes) > step:
            return super()._store_file(source, size_bytes, key, stop)
        digest = hashlib.sha256()
        with open(source, "rb", buffering=0) as file, self.buffers.in_use():

            def piece(start: int) -> memoryview:
                length = min(step, size_bytes - start)
                return self._piece(source, file.fileno(), start, length, digest, stop)

            store, name = stores.writing, self._key(key)
            if size_bytes <= step:
                obstore.put(store, name, piece(0), use_multipart=False)
                return digest.hexdigest()
            pieces = (piece(start) for start in range(0, size_bytes, step))
            in_flight = buffer_pool.POOL_BUFFERS
            try:
                obstore.put(store, name, pieces, chunk_size=step, max_concurrency=in_flight)
            except BaseException:
                abort_uploads_to(self._requests, name, self._errors)
                raise
        return digest.hexdigest()

    def _piece(
        self,
        source: Path,
        file: int,
        start: int,
        size_bytes: int,
        digest: hashlib._Hash,
        stop: CancelSignal,
    ) -> memoryview:
        """Read and hash a piece of a file.

        Its buffer is released when the returned view is garbage-collected, after obstore has sent
        it. So the caller must not keep the view.
        """
        buffer = self.buffers.acquire(size_bytes, stop)
        view = memoryview(buffer)[:size_bytes]
        release = weakref.finalize(view, self.buffers.release, buffer)
        release.atexit = False
        try:
            if read_at(file, start, view) != size_bytes:
                raise changed_during_upload(source)
            digest.update(view)
        except BaseException:
            release()  # now: a traceback may keep the view alive
            raise
        return view

    def _stores(self) -> _Stores | None:
        """obstore's stores; None if s3fs must move the contents."""
        with self._lock:
            if self._opened is None and not self._is_unsupported:
                with self._errors.translated("use"):
                    try:
                        self._opened = _Stores(
                            s3_store(self._fs, self._bucket, for_reading=True),
                            s3_store(self._fs, self._bucket, for_reading=False),
                        )
                    except UntranslatableError as error:
                        self._fall_back(error)
            return self._opened

    def _fall_back(self, error: UntranslatableError) -> None:
        reason = f"obstore cannot be used for {self.url}: it does not support {error}"
        if self._is_required:
            raise StorageError(f"{reason}; unset TRIALFLOW_STORAGE_ENGINE, or set it to s3fs")
        _logger.debug("%s; s3fs is used instead", reason)
        self._is_unsupported = True


def _get_options(start: int, end: int, version: str | None) -> GetOptions:
    options: GetOptions = {"range": (start, end)}
    if version is not None and version.startswith(VERSION):
        options["version"] = version.removeprefix(VERSION)
    return options


def _version_of(meta: Any) -> str:
    version = meta["version"]
    return f"{ETAG}{meta['e_tag']}" if version in (None, "null") else f"{VERSION}{version}"
