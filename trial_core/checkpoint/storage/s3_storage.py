"""S3 through the client of s3fs, with transfers of our own.

A file is uploaded in parts from the buffer pool and hashed while it is read, off the event loop. It
is read in ranges, which must all come from one version of the object. An upload that fails or is
cancelled leaves nothing unfinished.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import hashlib
import logging
import os
import threading
from collections.abc import Coroutine
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from trial_core.checkpoint.storage.base import RangeRead, Storage, StorageSpec, StoredObject
from trial_core.checkpoint.storage.buffer_pool import POOL_BUFFERS, piece_bytes
from trial_core.checkpoint.storage.local_files import changed_during_upload, read_at
from trial_core.checkpoint.storage.parallel import CancelSignal, WorkCancelled, in_parallel
from trial_core.checkpoint.storage.s3_requests import Body, S3Requests
from trial_core.checkpoint.storage.storage_errors import storage_exceptions

T = TypeVar("T")

_logger = logging.getLogger(__name__)

ABORT_SECONDS = 30.0
"""Time limit for aborting a failed upload. The sweep at the next run's start finds the rest."""

_NOT_ALLOWED = (errno.EPERM, errno.EACCES, errno.ENOSYS)


class S3Storage(Storage):
    """A bucket, or a folder in it."""

    def __init__(self, spec: StorageSpec, fs: Any, root: str) -> None:
        super().__init__(spec, fs, root)
        self._bucket, self._prefix, _ = fs.split_path(self._root)
        self._requests = S3Requests(fs, self._bucket)
        self._has_warned = False

    def read_into(
        self, key: str, start: int, view: memoryview, stop: CancelSignal, version: str | None = None
    ) -> RangeRead:
        """As `Storage.read_into`. The version is the object's version id, or its ETag."""
        with self._errors.translated(f"read {key} in"):
            return self._run(self._requests.get_range(self._key(key), start, view, version), stop)

    def unfinished_uploads(self, folder: str) -> list[tuple[str, StoredObject]]:
        """As `Storage.unfinished_uploads`: multipart uploads."""
        with self._errors.translated(f"list unfinished uploads to {folder} in"):
            found = self._if_allowed(self._requests.unfinished(self._key(f"{folder}/")), [])
        start = len(self._key(""))
        return [(each["Key"][start:], StoredObject(0, each.get("Initiated"))) for each in found]

    def abort_uploads(self, folder: str, before: datetime | None = None) -> int:
        """As `Storage.abort_uploads`: aborts multipart uploads."""
        with self._errors.translated(f"abort unfinished uploads to {folder} in"):
            return self._if_allowed(self._requests.abort(self._key(f"{folder}/"), None, before), 0)

    def _if_allowed(self, request: Coroutine[Any, Any, T], otherwise: T) -> T:
        """Send a request about unfinished uploads; return `otherwise` if it is not allowed."""
        try:
            return self._run(request)
        except OSError as error:
            if error.errno not in _NOT_ALLOWED and not isinstance(error, PermissionError):
                raise
            if not self._has_warned:
                _logger.warning(
                    "unfinished uploads of killed processes in %s cannot be listed and aborted, "
                    "and may take space: allow s3:ListBucketMultipartUploads and "
                    "s3:AbortMultipartUpload, or add a lifecycle rule to the bucket that aborts "
                    "them [%s]",
                    self.url, self._errors.shown(error),
                )  # fmt: skip
            self._has_warned = True
            return otherwise

    def _run(self, request: Coroutine[Any, Any, T], stop: CancelSignal | None = None) -> T:
        return run_on_loop(self._fs.loop, request, stop or CancelSignal())

    def _key(self, key: str) -> str:
        """The full key in the bucket."""
        return f"{self._prefix}/{key}".lstrip("/")

    def _server(self) -> str:
        """As `Storage._server`, with the name and version that it gives in its replies."""
        reply = self._run(self._requests.call("list_objects_v2", MaxKeys=1))
        name = reply["ResponseMetadata"]["HTTPHeaders"].get("server")
        return f"its server ({name})" if name else super()._server()

    def delete(self, key: str) -> None:
        """As `Storage.delete`. S3 reports no error if the object does not exist."""
        with self._errors.translated(f"delete {key} in"):
            self._run(self._requests.call("delete_object", Key=self._key(key)))

    # The requests of s3fs's own methods would not be retried after a 404 of a proxy; `find` would
    # take it for an empty folder, and sends two more requests for each empty folder.

    def _find(self, path: str) -> dict[str, dict[str, Any]]:
        found = self._run(self._requests.objects(f"{self._in_bucket(path)}/"))
        return {f"{self._bucket}/{each['Key']}": {**each, "size": each["Size"]} for each in found}

    def _get(self, path: str, size_bytes: int) -> bytes:
        return self._run(self._requests.get_first(self._in_bucket(path), size_bytes))

    def _create(self, path: str, data: bytes) -> None:
        self._put_small(path, data, IfNoneMatch="*")

    def _put_small(self, path: str, data: bytes, **options: Any) -> None:
        # Every server compares this digest with the bytes that arrive.
        md5 = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
        put = {"Key": self._in_bucket(path), "Body": data, "ContentMD5": md5, **options}
        self._run(self._requests.call("put_object", **put))

    def _in_bucket(self, path: str) -> str:
        """The full key of a path."""
        return path.removeprefix(f"{self._bucket}/")

    def _store_file(self, source: Path, size_bytes: int, key: str, stop: CancelSignal) -> str:
        store = self._store_whole if size_bytes <= piece_bytes(size_bytes) else self._store_parts
        with open(source, "rb", buffering=0) as file, self.buffers.in_use():
            digest = store(source, file.fileno(), size_bytes, self._key(key), stop)
        return digest.hexdigest()

    def _store_whole(
        self, source: Path, file: int, size_bytes: int, key: str, stop: CancelSignal
    ) -> hashlib._Hash:
        with self.buffers.lent(size_bytes, stop):  # waits its turn; accounts for the memory
            # Not into the buffer: an abandoned connection may still send from the data.
            data = os.pread(file, size_bytes, 0)
            if len(data) != size_bytes:
                raise changed_during_upload(source)
            body = Body(memoryview(data)) if data else b""
            self._run(self._requests.call("put_object", Body=body, Key=key), stop)
        return hashlib.sha256(data)

    def _store_parts(
        self, source: Path, file: int, size_bytes: int, key: str, stop: CancelSignal
    ) -> hashlib._Hash:
        digest, step, upload_id = hashlib.sha256(), piece_bytes(size_bytes), None
        starts, turn = iter(range(0, size_bytes, step)), Lock()

        def send_next(_: int, stop: CancelSignal) -> dict[str, Any]:
            with self.buffers.lent(step, stop) as buffer:
                with turn:  # the digest covers the bytes in order
                    start = next(starts)
                    view = memoryview(buffer)[: min(step, size_bytes - start)]
                    if read_at(file, start, view) != len(view):
                        raise changed_during_upload(source)
                    digest.update(view)
                part = {"Key": key, "UploadId": upload_id, "PartNumber": start // step + 1}
                reply = self._run(self._requests.call("upload_part", Body=Body(view), **part), stop)
            return {"PartNumber": part["PartNumber"], "ETag": reply["ETag"]}

        def call(method: str, **arguments: Any) -> dict[str, Any]:
            return self._run(self._requests.call(method, Key=key, **arguments), stop)

        try:
            upload_id = call("create_multipart_upload")["UploadId"]
            parts = in_parallel(send_next, range(0, size_bytes, step), POOL_BUFFERS, stop)
            parts.sort(key=itemgetter("PartNumber"))
            call("complete_multipart_upload", UploadId=upload_id, MultipartUpload={"Parts": parts})
        except BaseException:
            self._abort(key, upload_id)
            raise
        return digest

    def _abort(self, key: str, upload_id: str | None) -> None:
        """Abort a failed upload; without an id, as after a lost reply, all uploads to the key. Only
        logs a failure: the caller has the first cause."""
        abort = self._requests.abort(key, upload_id)
        try:
            self._run(asyncio.wait_for(abort, ABORT_SECONDS))
        except storage_exceptions() as error:
            _logger.warning(
                "an upload to %s was not aborted; it may take space until the trial runs again "
                "[%s]", key, self._errors.shown(error),
            )  # fmt: skip


def run_on_loop(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], stop: CancelSignal
) -> T:
    """Run a coroutine on another thread's event loop; it has ended when this returns or raises.
    Raises WorkCancelled if `stop` was set.

    The future of `asyncio.run_coroutine_threadsafe` counts as cancelled at once, while the
    coroutine may still write into a buffer.
    """
    tasks: list[asyncio.Task[T]] = []
    ended = threading.Event()

    def begin() -> None:
        tasks.append(loop.create_task(coroutine))
        tasks[0].add_done_callback(lambda _: ended.set())

    def cancel() -> None:
        loop.call_soon_threadsafe(lambda: tasks[0].cancel())  # after `begin`

    loop.call_soon_threadsafe(begin)
    try:
        with stop.calling(cancel):
            ended.wait()
    except BaseException:  # WorkCancelled, or Ctrl-C
        cancel()
        ended.wait()
        raise
    if tasks[0].cancelled():
        raise WorkCancelled
    return tasks[0].result()
