"""The requests to S3 that s3fs has no verb for, sent by s3fs's own client.

It signs them, finds credentials and tries again, as for its own. All are coroutines for fsspec's
event loop.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator
from typing import Any

from s3fs.core import S3_RETRYABLE_ERRORS

from trial_core.storage.chunks import RangeRead
from trial_core.storage.storage_errors import service_code, storage_exceptions

_STEP_BYTES = 256 * 2**10
_END_ATTEMPTS = 3
_LONGEST_PAUSE_SECONDS = 15.0
VERSION, ETAG = "version ", "etag "
"""How a `RangeRead` says which of the two its version is."""


class Body:
    """Bytes to send, without a copy: neither of ours nor of the client's."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def __len__(self) -> int:
        return len(self._view)

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        for start in range(0, len(self._view), _STEP_BYTES):
            yield self._view[start : start + _STEP_BYTES]

    # As a file, for what else botocore may do with a body, such as to sign it.

    def tell(self) -> int:
        """As of a file."""
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        """As of a file."""
        self._at = offset + (0, self._at, len(self._view))[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """As of a file."""
        end = len(self._view) if size is None or size < 0 else self._at + size
        data = bytes(self._view[self._at : end])
        self._at += len(data)
        return data


class S3Requests:
    """Requests about one bucket.

    Attributes:
        uses_checksums: whether a CRC of what is sent is worth computing: until the server has
            shown, by an answer without it, that it does not compare.
    """

    def __init__(self, fs: Any, bucket: str, uses_checksums: bool) -> None:
        self._fs = fs
        self._bucket = bucket
        self.uses_checksums = uses_checksums

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Where the coroutines run."""
        loop: asyncio.AbstractEventLoop = self._fs.loop
        return loop

    async def put(self, key: str, view: memoryview, crc: int | None) -> None:
        """Store an object, in one request."""
        await self._send("put_object", key, view, crc)

    async def create_upload(self, key: str) -> str:
        """Begin a multipart upload; its id."""
        how = {"ChecksumAlgorithm": "CRC32"} if self.uses_checksums else {}
        reply = await self._call("create_multipart_upload", Key=key, **how)
        upload_id: str = reply["UploadId"]
        return upload_id

    async def put_part(
        self, key: str, upload_id: str, number: int, view: memoryview, crc: int | None
    ) -> dict[str, Any]:
        """Send a part; what `complete_upload` must be told of it."""
        part = {"UploadId": upload_id, "PartNumber": number}
        reply = await self._send("upload_part", key, view, crc, **part)
        told: dict[str, Any] = {"PartNumber": number}
        told.update((name, reply[name]) for name in ("ETag", "ChecksumCRC32") if name in reply)
        return told

    async def complete_upload(self, key: str, upload_id: str, parts: list[dict[str, Any]]) -> None:
        """Make an object of the parts."""
        told = {"UploadId": upload_id, "MultipartUpload": {"Parts": parts}}
        try:
            await self._call("complete_multipart_upload", Key=key, **told)
        except storage_exceptions():
            # The reply may have been lost, and the retry told that there is no such upload.
            if not await self._is_made_of(key, parts):
                raise

    async def end_uploads(self, place: str, upload_id: str | None = None) -> int:
        """Abort all multipart uploads to a key, or below a folder; how many there were.

        Args:
            place: a key; or a folder, with a slash at its end.
            upload_id: of an upload to the key `place` that is known to be under way.
        """
        found = 0
        if upload_id is not None:
            found += await self._abort(place, upload_id)
        # More than once: a part that is on its way while its upload is aborted may keep it alive.
        for _ in range(_END_ATTEMPTS):
            uploads = await self._unfinished(place)
            if not uploads:
                break
            for key, each in uploads:
                found += await self._abort(key, each)
        return found

    async def get_range(
        self, key: str, start: int, view: memoryview, version: str | None
    ) -> RangeRead:
        """Read into `view`, and go on where it broke off when the connection breaks."""
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
                break  # the object ends there
            except S3_RETRYABLE_ERRORS:
                failed += 1
                if failed >= self._fs.retries:
                    raise
                await asyncio.sleep(min(0.1 * 1.7**failed, _LONGEST_PAUSE_SECONDS))
            except OSError as error:
                if service_code(error) != "InvalidRange":
                    raise
                break  # it has become shorter
        return RangeRead(done, version)

    async def _open_range(
        self, key: str, start: int, end: int, version: str | None
    ) -> dict[str, Any]:
        pin = {}
        if version is not None and version.startswith(VERSION):
            pin["VersionId"] = version.removeprefix(VERSION)
        # Not If-Match: Ceph compares it with the quotes, and so refuses every ETag.
        return await self._call("get_object", Key=key, Range=f"bytes={start}-{end - 1}", **pin)

    async def _is_made_of(self, key: str, parts: list[dict[str, Any]]) -> bool:
        """Whether the object of that key is just these parts, as its ETag tells."""
        try:
            seen = (await self._call("head_object", Key=key))["ETag"]
        except storage_exceptions():
            return False
        try:
            digests = b"".join(bytes.fromhex(part["ETag"].strip('"')) for part in parts)
        except ValueError:  # no MD5: the object is encrypted, or the server has its own ETags
            return False
        whole = hashlib.md5(digests, usedforsecurity=False).hexdigest()
        return bool(seen.strip('"') == f"{whole}-{len(parts)}")

    async def _unfinished(self, place: str) -> list[tuple[str, str]]:
        """Key and id of each multipart upload under way to a key, or below a folder."""
        is_folder = place.endswith("/")
        found: list[tuple[str, str]] = []
        page: dict[str, str] = {}
        while True:
            reply = await self._call("list_multipart_uploads", Prefix=place, **page)
            found += [(each["Key"], each["UploadId"]) for each in reply.get("Uploads", [])]
            if not reply.get("IsTruncated"):
                # A key may begin as another one does; and some servers do not look at the prefix.
                return [
                    (key, each)
                    for key, each in found
                    if (key.startswith(place) if is_folder else key == place)
                ]
            page = {
                "KeyMarker": reply["NextKeyMarker"],
                "UploadIdMarker": reply["NextUploadIdMarker"],
            }

    async def _abort(self, key: str, upload_id: str) -> int:
        """Abort an upload; 1, or 0 where it was over already."""
        try:
            await self._call("abort_multipart_upload", Key=key, UploadId=upload_id)
        except FileNotFoundError as error:
            if service_code(error) == "NoSuchBucket":
                raise
            return 0
        return 1

    async def _send(
        self, method: str, key: str, view: memoryview, crc: int | None, **how: Any
    ) -> dict[str, Any]:
        await self._fs.set_session()
        client = await self._fs.get_s3(self._bucket)
        client.meta.events.register_last(
            "before-call.s3", _do_not_wait, unique_id="trialflow-does-not-wait"
        )
        if crc is not None:
            how["ChecksumCRC32"] = base64.b64encode(crc.to_bytes(4, "big")).decode()
        reply = await self._call(method, Key=key, Body=Body(view) if view else b"", **how)
        if crc is not None and "ChecksumCRC32" not in reply:
            self.uses_checksums = False
        return reply

    async def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        # Older releases of s3fs leave it to each request to say who pays.
        reply: dict[str, Any] = await self._fs._call_s3(
            method, self._fs.req_kw, Bucket=self._bucket, **arguments
        )
        return reply


def _do_not_wait(params: dict[str, Any], **_: Any) -> None:
    """Send a body without asking first: aiohttp would wait for ever where a server does not say
    ``100 Continue``, and where it does that is one more journey there and back a part."""
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
