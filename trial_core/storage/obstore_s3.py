"""S3 with obstore for the bytes of files: its requests run beside Python, not in it.

Everything else stays with s3fs; and so do the bytes where obstore cannot be told what s3fs was.
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
from trial_core.storage.base import StorageSpec
from trial_core.storage.chunks import RangeRead, changed
from trial_core.storage.obstore_options import UntranslatableError, s3_store
from trial_core.storage.parallel import StopSignal
from trial_core.storage.s3 import S3Storage
from trial_core.storage.s3_requests import ETAG, VERSION
from trial_core.storage.s3_upload import end_uploads
from trial_core.storage.storage_errors import service_code

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import S3Store

_logger = logging.getLogger(__name__)

_STEP_BYTES = 2**20


class _Stores(NamedTuple):
    """The same bucket twice: limits on time differ."""

    reading: S3Store
    writing: S3Store


class ObstoreS3Storage(S3Storage):
    """A bucket, or a folder in it."""

    def __init__(
        self, spec: StorageSpec, fs: Any, root: str, uses_checksums: bool, *, is_required: bool
    ) -> None:
        """As `S3Storage`.

        Args:
            is_required: whether to raise where obstore cannot be told what s3fs was.
        """
        super().__init__(spec, fs, root, uses_checksums)
        self._is_required = is_required
        self._lock = Lock()
        self._opened: _Stores | None = None
        self._is_given_up = False

    def read_into(
        self, key: str, start: int, view: memoryview, stop: StopSignal, version: str | None = None
    ) -> RangeRead:
        """As `S3Storage.read_into`."""
        stores = self._stores()
        if stores is None:
            return super().read_into(key, start, view, stop, version)
        done = 0
        with self._explainer.explaining(f"read {key} in"):
            while done < len(view):
                before = done
                try:
                    reply = obstore.get(
                        stores.reading,
                        self._key(key),
                        options=_options(start + done, start + len(view), version),
                    )
                    seen = _version_of(reply.meta)
                    if version is not None and seen != version:
                        return RangeRead(done, seen)
                    version = seen
                    for chunk in reply.stream(_STEP_BYTES):
                        stop.check()
                        view[done : done + len(chunk)] = chunk
                        done += len(chunk)
                    break  # the object ends there
                except GenericError as error:
                    if service_code(error) == "InvalidRange":
                        break  # it has become shorter
                    if done == before:  # obstore itself has tried again
                        raise
        return RangeRead(done, version)

    def _store_file(self, source: Path, size_bytes: int, key: str, stop: StopSignal) -> str:
        stores = self._stores()
        step = buffer_pool.PIECE_BYTES
        if stores is None or buffer_pool.piece_bytes(size_bytes) > step:
            return super()._store_file(source, size_bytes, key, stop)
        digest = hashlib.sha256()
        with open(source, "rb", buffering=0) as file, self.window.in_use():

            def piece(start: int) -> memoryview:
                length = min(step, size_bytes - start)
                return self._piece(source, file.fileno(), start, length, digest, stop)

            store, name = stores.writing, self._key(key)
            if size_bytes <= step:
                obstore.put(store, name, piece(0), use_multipart=False)
                return digest.hexdigest()
            pieces = (piece(start) for start in range(0, size_bytes, step))
            at_once = buffer_pool.WINDOW_PIECES
            try:
                obstore.put(store, name, pieces, chunk_size=step, max_concurrency=at_once)
            except BaseException:
                end_uploads(self._requests, name, self._explainer)
                raise
        return digest.hexdigest()

    def _piece(
        self,
        source: Path,
        file: int,
        start: int,
        size_bytes: int,
        digest: hashlib._Hash,
        stop: StopSignal,
    ) -> memoryview:
        """A piece of a file, hashed; its buffer goes back to the window when nobody looks at it
        any more, which for most of the time is obstore. So nobody else should keep it."""
        buffer = self.window.take(size_bytes, stop)
        view = memoryview(buffer)[:size_bytes]
        give_back = weakref.finalize(view, self.window.give_back, buffer)
        give_back.atexit = False
        try:
            if not buffer_pool.read_piece(file, start, view):
                raise changed(source)
            digest.update(view)
        except BaseException:
            give_back()  # now: a traceback may keep the view for long
            raise
        return view

    def _stores(self) -> _Stores | None:
        """obstore's bucket; None where s3fs has to do everything."""
        with self._lock:
            if self._opened is None and not self._is_given_up:
                with self._explainer.explaining("use"):
                    try:
                        self._opened = _Stores(
                            s3_store(self._fs, self._bucket, for_reading=True),
                            s3_store(self._fs, self._bucket, for_reading=False),
                        )
                    except UntranslatableError as error:
                        self._give_up(error)
            return self._opened

    def _give_up(self, error: UntranslatableError) -> None:
        reason = f"obstore cannot be used for {self.url}: it has no word for {error}"
        if self._is_required:
            raise StorageError(f"{reason}; leave the choice of TRIALFLOW_STORAGE_ENGINE to us")
        _logger.debug("%s, so s3fs is", reason)
        self._is_given_up = True


def _options(start: int, end: int, version: str | None) -> GetOptions:
    options: GetOptions = {"range": (start, end)}
    if version is not None and version.startswith(VERSION):
        options["version"] = version.removeprefix(VERSION)
    return options


def _version_of(meta: Any) -> str:
    version = meta["version"]
    return f"{ETAG}{meta['e_tag']}" if version in (None, "null") else f"{VERSION}{version}"
