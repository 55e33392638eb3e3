"""Multipart uploads to S3, which end complete or aborted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from trial_core.storage.event_loop import LoopTask
from trial_core.storage.parallel import StopSignal
from trial_core.storage.s3_requests import S3Requests
from trial_core.storage.storage_errors import ErrorTranslator, storage_exceptions

_logger = logging.getLogger(__name__)

ABORT_SECONDS = 30.0
"""Time limit for aborting a failed upload. The sweep at the next run's start finds the rest."""


class MultipartUpload:
    """A context manager that uploads parts; it aborts the upload unless `complete` succeeded.

    The abort runs on the event loop, so an interrupt of this thread does not stop it.
    """

    def __init__(
        self, requests: S3Requests, key: str, stop: StopSignal, errors: ErrorTranslator
    ) -> None:
        self._requests = requests
        self._key = key
        self._stop = stop
        self._errors = errors
        self._id: str | None = None
        self._parts: list[LoopTask[dict[str, Any]]] = []
        self._is_complete = False

    def __enter__(self) -> MultipartUpload:
        try:
            create = self._requests.create_upload(self._key)
            self._id = LoopTask(self._requests.loop, create).result(self._stop)
        except BaseException:
            self._abort()  # the server may have begun an upload and its reply was lost
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._is_complete:
            self._abort()

    def send(self, view: memoryview, crc: int | None, on_end: Callable[[], None]) -> None:
        """Start to send the next part.

        Args:
            on_end: called when the view is no longer read.

        Raises:
            Exception: the error of an earlier part that has failed.
        """
        if self._id is None:
            raise RuntimeError("the upload has not begun")
        number = len(self._parts) + 1
        put = self._requests.put_part(self._key, self._id, number, view, crc)
        self._parts.append(LoopTask(self._requests.loop, put, on_end))
        for part in self._parts:
            if part.has_failed:
                part.result(self._stop)

    def complete(self) -> None:
        """Wait for all parts, then make them one object."""
        if self._id is None:
            raise RuntimeError("the upload has not begun")
        parts = [part.result(self._stop) for part in self._parts]
        complete = self._requests.complete_upload(self._key, self._id, parts)
        LoopTask(self._requests.loop, complete).result(self._stop)
        self._is_complete = True

    def _abort(self) -> None:
        abort_uploads_to(self._requests, self._key, self._errors, self._id, self._parts)


def abort_uploads_to(
    requests: S3Requests,
    key: str,
    errors: ErrorTranslator,
    upload_id: str | None = None,
    parts: Sequence[LoopTask[Any]] = (),
) -> None:
    """Abort all uploads to a key, on the event loop. Logs a failure: the caller has a first cause.

    Args:
        upload_id: the upload's id, if it is known.
        parts: parts of it that may still be in flight.
    """

    async def abort() -> None:
        for part in parts:
            await part.end()
        try:
            await asyncio.wait_for(requests.abort_uploads(key, upload_id), ABORT_SECONDS)
        except storage_exceptions() as error:
            _logger.warning(
                "an upload to %s was not aborted; it may take space until the trial runs again "
                "[%s]", key, errors.redact(f"{type(error).__name__}: {error}"),
            )  # fmt: skip

    LoopTask(requests.loop, abort()).wait()
