"""Multipart uploads to S3 with s3fs, which end complete or aborted. obstore makes its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from trial_core.storage.event_loop import LoopTask
from trial_core.storage.parallel import CancelSignal
from trial_core.storage.s3_requests import S3Requests
from trial_core.storage.storage_errors import ErrorTranslator, storage_exceptions

_logger = logging.getLogger(__name__)

ABORT_SECONDS = 30.0
"""Time limit for aborting a failed upload. The sweep at the next run's start finds the rest."""


SendPart = Callable[[memoryview, int | None, Callable[[], None]], None]
"""Starts to send the next part: bytes, CRC, and a callback for when the bytes are no longer read.
Raises the error of an earlier part that has failed."""


@contextmanager
def multipart_upload(
    requests: S3Requests, key: str, stop: CancelSignal, errors: ErrorTranslator
) -> Iterator[SendPart]:
    """Send parts inside the block; they become one object when it ends, or are aborted on an error.

    The abort runs on the event loop, so an interrupt of this thread does not stop it.
    """
    upload_id: str | None = None
    parts: list[LoopTask[dict[str, Any]]] = []
    try:
        # If the reply is lost, the id stays unknown; the abort then lists all uploads to the key.
        upload_id = known_id = LoopTask(requests.loop, requests.create_upload(key)).result(stop)

        def send(view: memoryview, crc: int | None, on_end: Callable[[], None]) -> None:
            put = requests.put_part(key, known_id, len(parts) + 1, view, crc)
            parts.append(LoopTask(requests.loop, put, on_end))
            for part in parts:
                if part.has_failed:
                    part.result(stop)

        yield send
        sent = [part.result(stop) for part in parts]
        LoopTask(requests.loop, requests.complete_upload(key, upload_id, sent)).result(stop)
    except BaseException:
        abort_uploads_to(requests, key, errors, upload_id, parts)
        raise


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
