"""Admits peers that know the run's secret, and closes the connections of all others.

Both ends prove that they know the secret before anything else is said (`framing`). A stranger has a
deadline, may send only a few bytes, and is logged. The number of strangers' connections and of
their log lines is limited, so that a port scan neither uses up the driver's files nor fills its
log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import msgspec

from trial_core.processes.slots.framing import (
    HANDSHAKE_SECONDS,
    NONCE_BYTES,
    PROOF_BYTES,
    ProtocolError,
    check_proof,
    new_nonce,
    proof,
    read_frame,
)
from trial_core.processes.slots.tls import DriverTls

logger = logging.getLogger(__name__)

MAX_UNPROVEN = 256
"""The most strangers that may be connected at once."""
ACCEPT_RETRY_SECONDS = 1.0
LOGGED_STRANGERS = 20
READ_BYTES = 2**16

PeerT = TypeVar("PeerT")


class Acceptor(Generic[PeerT]):
    """Accepts connections, in a thread of its own with an event loop.

    Args:
        name: the thread's.
        role: the role that a peer names: ``rank`` or ``agent``.
        read_hello: returns the peer that has sent this first message. Raises ProtocolError or
            msgspec.MsgspecError if it must not join.
        talk: serves a peer until its connection ends; then the connection is closed.
        expected: how many peers may come at once, besides strangers.
    """

    def __init__(
        self,
        name: str,
        secret: bytes,
        role: str,
        hello_max_bytes: int,
        read_hello: Callable[[bytes, asyncio.StreamWriter], PeerT],
        talk: Callable[[PeerT, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
        expected: int = 0,
    ) -> None:
        self._secret = secret
        self._role = role
        self._hello_max_bytes = hello_max_bytes
        self._read_hello = read_hello
        self._talk = talk
        self._expected = expected
        self._unproven = 0
        self._strangers = 0
        self._is_closing = False
        self._listening: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function in the loop's thread, unless the loop was closed. For any thread."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *arguments)

    def listen(self, listening: socket.socket, tls: DriverTls | None = None) -> None:
        """Accept connections of a bound socket, with TLS from other machines. For any thread.

        The socket is closed in the end.
        """
        listening.setblocking(False)
        self._listening.append(listening)
        self.call(lambda: self._start(self._accept(listening, tls)))

    def close(self) -> None:
        """Accept no more connections, and end the open ones. For other threads, once."""
        asyncio.run_coroutine_threadsafe(self._end(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    # ------------------------------------------------------------------ the loop's thread

    async def _end(self) -> None:
        self._is_closing = True
        for listening in self._listening:
            listening.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listening: socket.socket, tls: DriverTls | None) -> None:
        while True:
            try:
                connection, origin = await asyncio.get_running_loop().sock_accept(listening)
            except OSError as error:  # for example too many open files
                logger.warning("the driver cannot accept a connection: %s", error)
                await asyncio.sleep(ACCEPT_RETRY_SECONDS)
                continue
            self._start(self._serve(connection, origin, tls))

    async def _serve(self, connection: socket.socket, origin: Any, tls: DriverTls | None) -> None:
        if self._unproven >= MAX_UNPROVEN + self._expected:
            self._refuse(origin, ProtocolError("too many connections at once"))
            connection.close()
            return
        writer: asyncio.StreamWriter | None = None
        self._unproven += 1
        try:
            reader, writer = await _open_streams(connection, tls)
            peer = await asyncio.wait_for(self._admit(reader, writer, tls), HANDSHAKE_SECONDS)
        except (ProtocolError, OSError, EOFError, msgspec.MsgspecError) as e:
            self._unproven -= 1
            self._refuse(origin, e)
        except asyncio.CancelledError:
            connection.close()
            return
        else:
            self._unproven -= 1
            with contextlib.suppress(asyncio.CancelledError):  # the driver ends
                await self._talk(peer, reader, writer)
        if writer is not None:
            await _close(writer)

    async def _admit(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tls: DriverTls | None
    ) -> PeerT:
        nonce, certificate = new_nonce(), tls.digest if tls is not None else b""
        writer.write(nonce)
        seen = await reader.readexactly(PROOF_BYTES)
        check_proof(self._secret, self._role, nonce, seen, certificate)
        theirs = await reader.readexactly(NONCE_BYTES)
        writer.write(proof(self._secret, "driver", theirs, certificate))
        hello = await read_frame(reader, limit_bytes=self._hello_max_bytes)
        return self._read_hello(hello, writer)

    def _refuse(self, origin: Any, error: BaseException) -> None:
        self._strangers += 1
        if self._strangers > LOGGED_STRANGERS or self._is_closing:
            return
        last = "; later ones are not logged" if self._strangers == LOGGED_STRANGERS else ""
        what = str(error) or type(error).__name__
        source = f" from {origin}" if origin else ""  # a Unix socket's peer has no address
        logger.warning("rejected a connection%s to the driver: %s%s", source, what, last)


async def _open_streams(
    connection: socket.socket, tls: DriverTls | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The streams of an accepted connection, once TLS has begun."""
    # Not StreamWriter.start_tls: a client's first message sometimes came before it, and hung.
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    protocol = _ReadToTheEnd(reader, connection if tls is None else None)
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol,
        connection,
        ssl=tls.context if tls is not None else None,
        ssl_handshake_timeout=HANDSHAKE_SECONDS if tls is not None else None,
    )
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


class _ReadToTheEnd(asyncio.StreamReaderProtocol):
    """Reads everything that a peer sent before it closed, even after a write to it has failed.

    asyncio would end a connection without reading it, and drop the received bytes: the error by
    which a rank explains its end. With TLS, `connection` is None: its bytes are encrypted.
    """

    def __init__(self, reader: asyncio.StreamReader, connection: socket.socket | None) -> None:
        super().__init__(reader)
        self._connection = connection

    def connection_lost(self, exc: Exception | None) -> None:
        if isinstance(exc, ConnectionError):
            exc = None  # an end, before which everything is read
            with contextlib.suppress(OSError):
                while self._connection and (data := self._connection.recv(READ_BYTES)):
                    self.data_received(data)
        super().connection_lost(exc)


async def _close(writer: asyncio.StreamWriter) -> None:
    """Close a connection. Written bytes are sent before, unless the peer does not read them."""
    writer.close()
    with contextlib.suppress(OSError):
        await asyncio.wait_for(writer.wait_closed(), HANDSHAKE_SECONDS)
    writer.transport.abort()
