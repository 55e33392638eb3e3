"""An S3 endpoint that fails on purpose: a proxy in front of a real one, on a thread.

It counts requests and forwards them unchanged, with Host and signature, unless its plan has a fault
for them. Each client may have a separate address, so that the plan knows the client.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar
from xml.sax.saxutils import escape

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web
from yarl import URL

from tests.support.faults.plan import Fault, Plan, Seen
from tests.support.s3 import S3Server

Result = TypeVar("Result")

_HOP_BY_HOP = ("connection", "keep-alive", "transfer-encoding", "expect", "server", "date")
_ETAG = '"d41d8cd98f00b204e9800998ecf8427e"'
_ERRORS = {"500": (500, "InternalError"), "503": (503, "SlowDown")}
_POLL_SECONDS = 0.005
_SLICES_PER_SECOND = 50
_QUIET_LIMIT_SECONDS = 30.0
_LATE_SECONDS = 0.5


@dataclass
class FaultyS3:
    """A running proxy.

    Attributes:
        backend: the server behind it.
        plan: the faults from now on.
        on_kill: called on the proxy's thread when a request meets a ``kill`` fault.
        ignored: lower-case names of headers that are not forwarded, as if the server did not
            support them. Only for a server that checks no signatures.
        not_implemented: likewise, of headers that are answered with 501.
        page: status and text of the reply to a ``page`` fault.
        discards_from: bodies of so many bytes, and all parts of uploads, are counted and listed,
            but not stored, as by a storage that costs this machine nothing; None to store all.
        discarded: sizes in bytes, by bucket and key.
    """

    backend: S3Server
    loop: asyncio.AbstractEventLoop
    runner: web.AppRunner
    addresses: dict[int, str]
    session: ClientSession
    plan: Plan = field(default_factory=Plan)
    on_kill: Callable[[Seen], None] = lambda seen: None
    ignored: frozenset[str] = frozenset()
    not_implemented: frozenset[str] = frozenset()
    page: tuple[int, str] = (404, "404 page not found")
    discards_from: int | None = None
    discarded: dict[str, int] = field(default_factory=dict)
    _in_progress: list[str] = field(default_factory=list)

    def server(self, client: str = "") -> S3Server:
        """This endpoint as an S3 server, at a new address for `client`."""
        port = self._call(_listen(self.runner))
        self.addresses[port] = client
        return S3Server(
            f"http://127.0.0.1:{port}", self.backend.access_key, self.backend.secret_key
        )

    def new_plan(self, *faults: Fault) -> Plan:
        """Replace the plan, once no request is in progress."""
        self.wait_until_quiet()
        self.plan = Plan(*faults)
        return self.plan

    def wait_until_quiet(self) -> None:
        """Wait until no request is in progress: its client may have been killed."""
        deadline = time.monotonic() + _QUIET_LIMIT_SECONDS
        while self._in_progress:
            assert time.monotonic() < deadline, (
                f"requests did not end: {', '.join(self._in_progress)}"
            )
            time.sleep(_POLL_SECONDS)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request as the plan says."""
        port = request.transport.get_extra_info("sockname")[1] if request.transport else 0
        client, key = self.addresses.get(port, ""), request.raw_path
        name = f"{client}: {request.method} {key}"
        self._in_progress.append(name)
        try:
            return await self._answer(request, self.plan.next(client, request.method, key))
        finally:
            self._in_progress.remove(name)

    async def _answer(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        fault = seen.fault
        kind = fault.kind if fault else None
        if fault and kind == "cut request":
            await _read(request, fault.byte)
            return _cut(request)
        if kind == "hang":
            return await _hang(request)
        if kind == "kill before":
            self.on_kill(seen)
            return _cut(request)
        if self.discards_from is not None and _is_large(request, self.discards_from):
            return await self._discard(request)
        if request.method == "DELETE":
            self.discarded.pop(request.path, None)
        pace = fault.bytes_per_second if fault and kind == "slow" else None
        body = await _read(request, None, pace)
        if kind in _ERRORS:
            return _error(*_ERRORS[kind])
        if kind == "page":
            return web.Response(status=self.page[0], text=self.page[1])
        if kind == "late":
            _cut(request)
            await asyncio.sleep(_LATE_SECONDS)
        if not self.not_implemented.isdisjoint(map(str.lower, request.headers)):
            return _error(501, "NotImplemented")
        status, headers, reply = await self._forward(request, body)
        if self.discarded and request.method == "GET" and "list-type" in request.query:
            headers, reply = self._with_discarded(request, headers, reply)
        if kind == "kill after":
            self.on_kill(seen)
        if kind in ("kill after", "lose reply", "late"):
            return _cut(request)
        response = web.StreamResponse(status=status, headers=headers)
        if fault and kind == "cut reply":
            part = reply[: fault.byte] if fault.byte < len(reply) else None
            return await _begin(request, response, part)
        await response.prepare(request)
        await _write(response, reply if request.method != "HEAD" else b"", pace)
        await response.write_eof()
        return response

    async def _discard(self, request: web.Request) -> web.Response:
        key, size = request.path, 0
        async for data in request.content.iter_any():
            size += len(data)
        if request.method == "PUT":
            before = self.discarded.get(key, 0) if "uploadId" in request.query else 0
            self.discarded[key] = before + size
            return web.Response(headers={"ETag": _ETAG})
        name = "CompleteMultipartUploadResult"
        text = f"<{name}><ETag>{_ETAG}</ETag></{name}>"
        return web.Response(text=text, content_type="application/xml")

    def _with_discarded(
        self, request: web.Request, headers: list[tuple[str, str]], reply: bytes
    ) -> tuple[list[tuple[str, str]], bytes]:
        """The reply to a listing, with the objects that are not stored."""
        folder = f"{request.path.rstrip('/')}/"
        prefix = folder + request.query.get("prefix", "")
        found = "".join(
            f"<Contents><Key>{escape(key.removeprefix(folder))}</Key><ETag>{_ETAG}</ETag>"
            f"<LastModified>2030-01-01T00:00:00.000Z</LastModified><Size>{size}</Size></Contents>"
            for key, size in self.discarded.items()
            if key.startswith(prefix)
        )
        whole = reply.replace(b"</ListBucketResult>", f"{found}</ListBucketResult>".encode())
        return [it for it in headers if it[0].lower() != "content-length"], whole

    async def _forward(
        self, request: web.Request, body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        """Forward the request to the real server; its reply."""
        dropped = {*_HOP_BY_HOP, *self.ignored}
        headers = [(k, v) for k, v in request.headers.items() if k.lower() not in dropped]
        url = URL(self.backend.endpoint_url + request.raw_path, encoded=True)
        try:
            async with self.session.request(
                request.method, url, headers=headers, data=body or None, allow_redirects=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            ) as reply:  # fmt: skip
                kept = [(k, v) for k, v in reply.headers.items() if k.lower() not in _HOP_BY_HOP]
                return reply.status, kept, await reply.read()
        except ClientError as error:  # the real server is gone, which is not planned
            raise web.HTTPBadGateway(text=f"{type(error).__name__}: {error}") from error

    def _call(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(_QUIET_LIMIT_SECONDS)


@contextmanager
def faulty_s3(backend: S3Server) -> Iterator[FaultyS3]:
    """A proxy in front of `backend` within the block, without faults at first."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="faulty-s3", daemon=True)
    thread.start()

    def call(work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, loop).result(_QUIET_LIMIT_SECONDS)

    proxy = call(_start(backend))
    try:
        yield proxy
    finally:
        call(_stop(proxy))
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_QUIET_LIMIT_SECONDS)
        loop.close()


async def _start(backend: S3Server) -> FaultyS3:
    session = ClientSession(
        auto_decompress=False, timeout=ClientTimeout(total=None), connector=TCPConnector(limit=0)
    )
    app = web.Application(client_max_size=2**40)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    proxy = FaultyS3(backend, asyncio.get_running_loop(), runner, {}, session)
    app.router.add_route("*", "/{path:.*}", proxy.handle)
    await runner.setup()
    return proxy


async def _stop(proxy: FaultyS3) -> None:
    await proxy.runner.cleanup()
    await proxy.session.close()


def _is_large(request: web.Request, from_bytes: int) -> bool:
    if "uploadId" in request.query:  # of parts that are not there
        return request.method in ("PUT", "POST")
    return request.method == "PUT" and (request.content_length or 0) >= from_bytes


async def _listen(runner: web.AppRunner) -> int:
    """Listen on another free port."""
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port: int = runner.addresses[-1][1]
    return port


async def _read(request: web.Request, limit: int | None, pace: int | None = None) -> bytes:
    """The request's body, up to `limit` bytes of it, at most `pace` bytes a second."""
    body = bytearray()
    while limit is None or len(body) < limit:
        piece = -1 if limit is None else limit - len(body)
        chunk = await request.content.read(_slice(pace) if pace else piece)
        if not chunk:
            break
        body += chunk
        if pace:
            await asyncio.sleep(len(chunk) / pace)
    return bytes(body)


async def _write(response: web.StreamResponse, body: bytes, pace: int | None) -> None:
    size = _slice(pace) if pace else max(len(body), 1)
    for start in range(0, len(body), size):
        chunk = body[start : start + size]
        await response.write(chunk)
        if pace:
            await asyncio.sleep(len(chunk) / pace)


async def _begin(
    request: web.Request, response: web.StreamResponse, part: bytes | None
) -> web.StreamResponse:
    """Send a reply's head and a part of its body, or (None) a part of its head, then cut."""
    if part is not None:
        await response.prepare(request)
        await response.write(part)
    elif request.transport is not None:
        request.transport.write(f"HTTP/1.1 {response.status} OK\r\nContent-Le".encode())
    _cut(request, is_flushed=True)
    return response if part is not None else web.Response()


async def _hang(request: web.Request) -> web.StreamResponse:
    """Read all that the client sends, and wait until it disconnects."""
    # A disconnect is only noticed after the last byte that the client has sent.
    with suppress(ConnectionError):
        async for _ in request.content.iter_any():
            pass
    while request.transport is not None and not request.transport.is_closing():
        await asyncio.sleep(_POLL_SECONDS)
    return web.Response()


def _cut(request: web.Request, *, is_flushed: bool = False) -> web.StreamResponse:
    """End the connection: at once, or once the written bytes are sent."""
    if request.transport is not None:
        request.transport.close() if is_flushed else request.transport.abort()
    return web.Response()


def _error(status: int, code: str) -> web.StreamResponse:
    text = f"<Error><Code>{code}</Code><Message>injected</Message></Error>"
    return web.Response(status=status, text=text, content_type="application/xml")


def _slice(pace: int) -> int:
    return max(pace // _SLICES_PER_SECOND, 1)
