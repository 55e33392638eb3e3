"""S3 requests that s3fs has no method for, sent by s3fs's client.

The client signs them, finds credentials and retries, as for its own requests. All methods are
coroutines for fsspec's event loop.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any, NamedTuple

from s3fs.core import S3_RETRYABLE_ERRORS

from trial_core.storage.base import RangeRead
from trial_core.storage.storage_errors import service_code, storage_exceptions

_STEP_BYTES = 256 * 2**10
_ABORT_ATTEMPTS = 3
_LONGEST_PAUSE_SECONDS = 15.0
VERSION, ETAG = "version ", "etag "
"""Prefixes of a `RangeRead`'s version: a version id, or an ETag where the bucket keeps none."""


class Body:
    """A request's body, sent without a copy."""

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
        """As a file's `tell`."""
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        """As a file's `seek`."""
        self._position = offset + (0, self._position, len(self._view))[whence]
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """As a file's `read`."""
        end = len(self._view) if size is None or size < 0 else self._position + size
        data = bytes(self._view[self._position : end])
        self._position += len(data)
        return data


class UnfinishedUpload(NamedTuple):
    """A multipart upload that was begun, and neither completed nor aborted.

    Attributes:
        begun_at: by the storage's clock; None: the storage does not tell.
    """

    key: str
    upload_id: str
    begun_at: datetime | None


class S3Requests:
    """Requests to one bucket.

    Attributes:
        uses_checksums: whether to send a CRC with each body. Becomes False after a reply without a
            CRC: that server does not check it.
    """

    def __init__(self, fs: Any, bucket: str, uses_checksums: bool) -> None:
        self._fs = fs
        self._bucket = bucket
        self.uses_checksums = uses_checksums

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that the coroutines run on."""
        loop: asyncio.AbstractEventLoop = self._fs.loop
        return loop

    async def put(self, key: str, view: memoryview, crc: int | None) -> None:
        """Store an object in one request."""
        await self._send("put_object", key, view, crc)

    async def create_upload(self, key: str) -> str:
        """Begin a multipart upload; return its id."""
        algorithm = {"ChecksumAlgorithm": "CRC32"} if self.uses_checksums else {}
        reply = await self._call("create_multipart_upload", Key=key, **algorithm)
        upload_id: str = reply["UploadId"]
        return upload_id

    async def put_part(
        self, key: str, upload_id: str, number: int, view: memoryview, crc: int | None
    ) -> dict[str, Any]:
        """Send a part; return what `complete_upload` needs of it."""
        arguments = {"UploadId": upload_id, "PartNumber": number}
        reply = await self._send("upload_part", key, view, crc, **arguments)
        part: dict[str, Any] = {"PartNumber": number}
        part.update((name, reply[name]) for name in ("ETag", "ChecksumCRC32") if name in reply)
        return part

    async def complete_upload(self, key: str, upload_id: str, parts: list[dict[str, Any]]) -> None:
        """Make the parts one object."""
        arguments = {"UploadId": upload_id, "MultipartUpload": {"Parts": parts}}
        try:
            await self._call("complete_multipart_upload", Key=key, **arguments)
        except storage_exceptions():
            # If the first reply was lost, the client's retry fails: the upload no longer exists.
            if not await self._consists_of(key, parts):
                raise

    async def abort_uploads(self, prefix: str, upload_id: str | None = None) -> int:
        """Abort all multipart uploads to a key, or below a folder; return their number.

        Args:
            prefix: a key, or a folder with a slash at its end.
            upload_id: a known upload to the key `prefix`.
        """
        aborted = 0
        if upload_id is not None:
            aborted += await self._abort(prefix, upload_id)
        # Repeat: a part in flight during the abort may keep its upload alive.
        for _ in range(_ABORT_ATTEMPTS):
            uploads = await self.unfinished(prefix)
            if not uploads:
                break
            for each in uploads:
                aborted += await self._abort(each.key, each.upload_id)
        return aborted

    async def get_range(
        self, key: str, start: int, view: memoryview, version: str | None
    ) -> RangeRead:
        """Fill `view` from `start` on; continue from the last byte after a broken connection."""
        done, failed = 0, 0
        while done < len(view):
            try:
                reply = await self._open_range(key, start + done, start + len(view), version)
                seen = _version_of(reply)
                if version is not None and seen != version:
                    return RangeRead(done, seen)
                version = seen
                async for chunk in _chunks(reply["Body"]):
                    view[done : done + len(chunk)] = chunk
                    done += len(chunk)
                break  # the object ends here
            except S3_RETRYABLE_ERRORS:
                failed += 1
                if failed >= self._fs.retries:
                    raise
                await asyncio.sleep(min(0.1 * 1.7**failed, _LONGEST_PAUSE_SECONDS))
            except OSError as error:
                if service_code(error) != "InvalidRange":
                    raise
                break  # the object has become shorter
        return RangeRead(done, version)

    async def _open_range(
        self, key: str, start: int, end: int, version: str | None
    ) -> dict[str, Any]:
        pin = {}
        if version is not None and version.startswith(VERSION):
            pin["VersionId"] = version.removeprefix(VERSION)
        # Not If-Match: Ceph includes the quotes in its comparison, so no ETag matches.
        return await self._call("get_object", Key=key, Range=f"bytes={start}-{end - 1}", **pin)

    async def _consists_of(self, key: str, parts: list[dict[str, Any]]) -> bool:
        """Whether the object's ETag is that of exactly these parts."""
        try:
            seen = (await self._call("head_object", Key=key))["ETag"]
        except storage_exceptions():
            return False
        try:
            digests = b"".join(bytes.fromhex(part["ETag"].strip('"')) for part in parts)
        except ValueError:  # no MD5: an encrypted object, or a server with other ETags
            return False
        whole = hashlib.md5(digests, usedforsecurity=False).hexdigest()
        return bool(seen.strip('"') == f"{whole}-{len(parts)}")

    async def unfinished(self, prefix: str) -> list[UnfinishedUpload]:
        """All unfinished multipart uploads to a key, or below a folder.

        Args:
            prefix: a key, or a folder with a slash at its end.
        """
        is_folder = prefix.endswith("/")
        found: list[UnfinishedUpload] = []
        page: dict[str, str] = {}
        while True:
            reply = await self._call("list_multipart_uploads", Prefix=prefix, **page)
            found += [
                UnfinishedUpload(each["Key"], each["UploadId"], each.get("Initiated"))
                for each in reply.get("Uploads", [])
            ]
            if not reply.get("IsTruncated"):
                # One key may be the prefix of another, and some servers ignore the prefix.
                return [
                    each
                    for each in found
                    if (each.key.startswith(prefix) if is_folder else each.key == prefix)
                ]
            page = {
                "KeyMarker": reply["NextKeyMarker"],
                "UploadIdMarker": reply["NextUploadIdMarker"],
            }

    async def _abort(self, key: str, upload_id: str) -> int:
        """Abort an upload; return 1, or 0 if it no longer exists."""
        try:
            await self._call("abort_multipart_upload", Key=key, UploadId=upload_id)
        except FileNotFoundError as error:
            if service_code(error) == "NoSuchBucket":
                raise
            return 0
        return 1

    async def _send(
        self, method: str, key: str, view: memoryview, crc: int | None, **arguments: Any
    ) -> dict[str, Any]:
        await self._fs.set_session()
        client = await self._fs.get_s3(self._bucket)
        client.meta.events.register_last(
            "before-call.s3", _remove_expect, unique_id="trialflow-remove-expect"
        )
        if crc is not None:
            arguments["ChecksumCRC32"] = base64.b64encode(crc.to_bytes(4, "big")).decode()
        reply = await self._call(method, Key=key, Body=Body(view) if view else b"", **arguments)
        if crc is not None and "ChecksumCRC32" not in reply:
            self.uses_checksums = False
        return reply

    async def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        # Older releases of s3fs do not add `req_kw` (requester pays) by themselves.
        reply: dict[str, Any] = await self._fs._call_s3(
            method, self._fs.req_kw, Bucket=self._bucket, **arguments
        )
        return reply


def _remove_expect(params: dict[str, Any], **_: Any) -> None:
    """Send the body without waiting for ``100 Continue``.

    aiohttp would wait for ever for a server that does not send it; otherwise it costs a round trip.
    """
    params["headers"].pop("Expect", None)


def _version_of(reply: dict[str, Any]) -> str:
    version = reply.get("VersionId")
    if version in (None, "null"):
        return ETAG + str(reply.get("ETag"))
    return VERSION + str(version)


async def _chunks(body: Any) -> AsyncIterator[bytes]:
    try:
        while chunk := await body.read(_STEP_BYTES):
            yield chunk
    finally:
        body.close()
