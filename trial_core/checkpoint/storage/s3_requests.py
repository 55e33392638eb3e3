"""S3 requests, sent by s3fs's client.

The client signs them, finds credentials and retries, as for its own requests. All methods are
coroutines for fsspec's event loop: see `s3_storage.run_on_loop`.

botocore renews credentials that say when they end (a role, SSO, ``credential_process``). Those of a
file or of environment variables it reads once, though a program may rewrite ``~/.aws/credentials``
every hour. So they are read again when the storage refuses them.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

from aiobotocore.session import AioSession
from botocore.credentials import RefreshableCredentials
from botocore.exceptions import BotoCoreError, ClientError
from s3fs.core import _error_wrapper

from trial_core.checkpoint.storage.base import RangeRead
from trial_core.checkpoint.storage.storage_errors import is_foreign_404, service_code, statuses

_logger = logging.getLogger(__name__)

_STEP_BYTES = 256 * 2**10
_ABORT_ATTEMPTS = 3
_FOREIGN_404_TRIES = 5
_FIRST_PAUSE_SECONDS = 0.2
VERSION, ETAG = "version ", "etag "
"""Prefixes of a `RangeRead`'s version: a version id, or an ETag where the bucket keeps none."""
_ENDED = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidClientTokenId"}
    | {"InvalidToken", "SignatureDoesNotMatch", "TokenRefreshRequired", "UserSuspended"}
)
_FORBIDDEN = (401, 403)
"""Ceph answers an ended session token with AccessDenied, as it does a missing right."""


class Body:
    """A request's body, sent in small steps without a copy.

    Sent as bytes, it would be copied into the connection's buffer as a whole: measured, that takes
    1.5 times the processor time of an upload and three times the memory.
    """

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._position = 0

    def __len__(self) -> int:
        return len(self._view)

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        for start in range(0, len(self._view), _STEP_BYTES):
            yield self._view[start : start + _STEP_BYTES]

    # A file's methods, for botocore: it reads the body to sign it, for example.

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, len(self._view))[whence]
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        end = len(self._view) if size is None or size < 0 else self._position + size
        data = bytes(self._view[self._position : end])
        self._position += len(data)
        return data


class S3Requests:
    """Requests to one bucket."""

    def __init__(self, fs: Any, bucket: str) -> None:
        self._fs = fs
        self._bucket = bucket

    async def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Send a request; return the reply. If its credentials have been rewritten, send it again:
        a body can be read again from its beginning."""
        await self._fs.set_session()
        client = await self._fs.get_s3(self._bucket)
        events = client.meta.events
        events.register_last("before-call.s3", _remove_expect, unique_id="trialflow-remove-expect")
        events.register("needs-retry.s3", _pause_after_404, unique_id="trialflow-foreign-404")
        credentials = client._request_signer._credentials
        try:
            return await self._send(method, **arguments)
        except OSError as error:
            if not await _has_other_credentials(self._fs, client, credentials, error):
                raise
        return await self._send(method, **arguments)

    async def _send(self, method: str, **arguments: Any) -> dict[str, Any]:
        # Older releases of s3fs do not add `req_kw` (requester pays) by themselves.
        reply: dict[str, Any] = await self._fs._call_s3(
            method, self._fs.req_kw, Bucket=self._bucket, **arguments
        )
        return reply

    async def get_range(
        self, key: str, start: int, view: memoryview, version: str | None
    ) -> RangeRead:
        """Fill `view` from `start` on. After a broken connection the range is read again."""
        # Not If-Match: Ceph includes the quotes in its comparison, so no ETag matches.
        pin = {}
        if version is not None and version.startswith(VERSION):
            pin["VersionId"] = version.removeprefix(VERSION)
        span = f"bytes={start}-{start + len(view) - 1}"

        async def read() -> RangeRead:
            reply = await self.call("get_object", Key=key, Range=span, **pin)
            done, body = 0, reply["Body"]
            try:
                while chunk := await body.read(_STEP_BYTES):
                    view[done : done + len(chunk)] = chunk
                    done += len(chunk)
            finally:
                body.close()
            return RangeRead(done, _version_of(reply))

        try:
            seen: RangeRead = await _error_wrapper(read, retries=self._fs.retries)
        except OSError as error:
            if service_code(error) != "InvalidRange":
                raise
            return RangeRead(0, version)  # the object has become shorter
        return seen

    async def get_first(self, key: str, size_bytes: int) -> bytes:
        """The first bytes of an object, all of them if it is shorter."""

        async def read() -> bytes:
            body, data = (await self.call("get_object", Key=key))["Body"], bytearray()
            try:
                while chunk := await body.read(min(_STEP_BYTES, size_bytes - len(data))):
                    data += chunk
            finally:
                body.close()
            return bytes(data)

        data: bytes = await _error_wrapper(read, retries=self._fs.retries)
        return data

    async def objects(self, prefix: str) -> list[dict[str, Any]]:
        """All objects whose keys begin with the prefix: S3's ``Key``, ``Size``, …"""
        found: list[dict[str, Any]] = []
        page: dict[str, str] | None = {}
        while page is not None:
            reply = await self.call("list_objects_v2", Prefix=prefix, **page)
            is_truncated, token = reply.get("IsTruncated"), reply.get("NextContinuationToken")
            if is_truncated is None or (is_truncated and token is None):
                # For example a page of a proxy that is well-formed XML.
                raise OSError(errno.EIO, "the reply is not an S3 listing (ListObjectsV2)")
            found += reply.get("Contents", [])
            page = {"ContinuationToken": token} if token is not None and is_truncated else None
        return found

    async def unfinished(self, prefix: str) -> list[dict[str, Any]]:
        """All unfinished multipart uploads to a key, or below a folder with a slash at its end:
        S3's ``Key``, ``UploadId`` and ``Initiated``."""
        found: list[dict[str, Any]] = []
        page: dict[str, str] | None = {}
        while page is not None:
            reply = await self.call("list_multipart_uploads", Prefix=prefix, **page)
            found += reply.get("Uploads", [])
            page = {
                "KeyMarker": reply["NextKeyMarker"],
                "UploadIdMarker": reply["NextUploadIdMarker"],
            } if reply.get("IsTruncated") else None  # fmt: skip
        # One key may be the prefix of another, and some servers ignore the prefix.
        is_folder = prefix.endswith("/")
        return [
            each
            for each in found
            if (each["Key"].startswith(prefix) if is_folder else each["Key"] == prefix)
        ]

    async def abort(
        self, prefix: str, upload_id: str | None = None, before: datetime | None = None
    ) -> int:
        """Abort the multipart uploads that `unfinished` finds, or those that began before a time;
        return their number. `upload_id`: a known one to the key `prefix`: its abort needs no right
        to list."""
        aborted = 0
        if upload_id is not None:
            aborted += await self._abort(prefix, upload_id)
        # Repeat: a part in flight during the abort may keep its upload alive.
        for _ in range(_ABORT_ATTEMPTS):
            uploads = [
                each
                for each in await self.unfinished(prefix)
                if before is None or ("Initiated" in each and each["Initiated"] < before)
            ]
            for each in uploads:
                aborted += await self._abort(each["Key"], each["UploadId"])
            if not uploads:
                break
        return aborted

    async def _abort(self, key: str, upload_id: str) -> int:
        """Abort an upload; return 1, or 0 if it no longer exists."""
        try:
            await self.call("abort_multipart_upload", Key=key, UploadId=upload_id)
        except FileNotFoundError as error:
            if service_code(error) != "NoSuchUpload":
                raise
            return 0
        return 1


async def _has_other_credentials(fs: Any, client: Any, refused: Any, error: OSError) -> bool:
    """Look for credentials where the client's came from; if there are others, let it use them, and
    return True: the request should be sent again. `refused`: those of the request that failed."""
    code = service_code(error)
    if refused is None or refused.method == "explicit":  # of the options: they do not change
        return False
    if code not in _ENDED:
        # What is renewed by its end was refused for its rights: do not ask its source each time.
        is_forbidden = any(status in _FORBIDDEN for status in statuses(error))
        if not is_forbidden or isinstance(refused, RefreshableCredentials):
            return False
    if client._request_signer._credentials is not refused:
        return True  # another request has found them
    try:
        found = await AioSession(**fs.kwargs).get_credentials()
    except (BotoCoreError, ClientError, OSError):
        return False  # the file is being written; the caller has `error`
    if found is None or _are_equal(found, refused):
        return False
    client._request_signer._credentials = found
    _logger.info(
        "the storage refused the credentials (%s); new ones of %s count", code, found.method
    )
    return True


def _are_equal(found: Any, refused: Any) -> bool:
    if isinstance(found, RefreshableCredentials) or isinstance(refused, RefreshableCredentials):
        return False  # to compare them would ask their source
    names = ("access_key", "secret_key", "token")
    return all(getattr(found, name) == getattr(refused, name) for name in names)


def _remove_expect(params: dict[str, Any], **_: Any) -> None:
    """Send the body without waiting for ``100 Continue``: aiohttp would wait for ever for a server
    that does not send it; otherwise it costs a round trip."""
    params["headers"].pop("Expect", None)


def _pause_after_404(
    response: tuple[Any, dict[str, Any]] | None, attempts: int, operation: Any, **_: Any
) -> float | None:
    """Seconds until a request is sent again after a 404 of a proxy, as botocore does after a 502,
    503 or 504; None if it is not sent again. To HEAD, a storage answers 404 without a document."""
    is_over = attempts >= _FOREIGN_404_TRIES or operation.http["method"] == "HEAD"
    if response is None or is_over or not is_foreign_404(response[1]):
        return None
    return _FIRST_PAUSE_SECONDS * 2.0 ** (attempts - 1)


def _version_of(reply: dict[str, Any]) -> str:
    version = reply.get("VersionId")
    return f"{ETAG}{reply.get('ETag')}" if version in (None, "null") else f"{VERSION}{version}"
