"""A file's way to S3 in parts, of which no end but a whole object or nothing at all is left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from trial_core.storage.event_loop import LoopTask
from trial_core.storage.parallel import StopSignal
from trial_core.storage.s3_requests import S3Requests
from trial_core.storage.storage_errors import Explainer, storage_exceptions

_logger = logging.getLogger(__name__)

ABORT_SECONDS = 30.0
"""How long an upload that has failed may take to be aborted. What is left after that, the sweep at
the next run's start finds."""


class MultipartUpload:
    """One upload: a block, which sends parts and completes, or else aborts however it is left.

    The abortion runs on the event loop, so nothing that befalls the thread interrupts it.
    """

    def __init__(
        self, requests: S3Requests, key: str, stop: StopSignal, explainer: Explainer
    ) -> None:
        self._requests = requests
        self._key = key
        self._stop = stop
        self._explainer = explainer
        self._id: str | None = None
        self._parts: list[LoopTask[dict[str, Any]]] = []
        self._is_complete = False

    def __enter__(self) -> MultipartUpload:
        try:
            create = self._requests.create_upload(self._key)
            self._id = LoopTask(self._requests.loop, create).result(self._stop)
        except BaseException:
            self._abort()  # the server may have begun one, and its answer was lost
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
        """Begin to send the next part.

        Args:
            on_end: called when the view is not looked at any more.

        Raises:
            Exception: an earlier part has failed: what of.
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
        """Wait for all parts, and make an object of them."""
        if self._id is None:
            raise RuntimeError("the upload has not begun")
        parts = [part.result(self._stop) for part in self._parts]
        complete = self._requests.complete_upload(self._key, self._id, parts)
        LoopTask(self._requests.loop, complete).result(self._stop)
        self._is_complete = True

    def _abort(self) -> None:
        end_uploads(self._requests, self._key, self._explainer, self._id, self._parts)


def end_uploads(
    requests: S3Requests,
    key: str,
    explainer: Explainer,
    upload_id: str | None = None,
    parts: Sequence[LoopTask[Any]] = (),
) -> None:
    """Abort what has failed of uploads to a key. Does not raise: there is a first cause already.

    It is done on the event loop, also if this thread is interrupted meanwhile.

    Args:
        upload_id: of the upload, if it is known.
        parts: those of its parts that may be under way.
    """

    async def end() -> None:
        for part in parts:
            await part.end()
        try:
            await asyncio.wait_for(requests.end_uploads(key, upload_id), ABORT_SECONDS)
        except storage_exceptions() as error:
            _logger.warning(
                "an upload to %s was not aborted, and may take space until the trial runs again "
                "[%s]", key, explainer.hide(f"{type(error).__name__}: {error}"),
            )  # fmt: skip

    LoopTask(requests.loop, end()).wait()
