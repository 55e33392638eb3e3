"""The other end of the driver's connections: a rank's, which is blocking, and an agent's."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from weakref import WeakSet

from trial_core.errors import LaunchError, SlotsError
from trial_core.messages import Message, encode
from trial_core.processes.slots.addresses import parse_driver_address
from trial_core.processes.slots.framing import (
    HANDSHAKE_SECONDS,
    HEADER,
    NONCE_BYTES,
    PROOF_BYTES,
    ProtocolError,
    check_proof,
    frame,
    frame_length,
    new_nonce,
    proof,
)
from trial_core.processes.slots.tls import TlsSocket, client_context, digest_of

SILENCE_SECONDS = 20
"""A machine is lost if its kernel does not answer for this long."""
PROBE_SECONDS = 5
RETRY_SECONDS = 1.0

logger = logging.getLogger(__name__)


class RankConnection:
    """A rank's connection to the driver. Any thread may call `send`; one thread receives.

    Forked children close their copies, or the driver would not see the rank's end.

    Args:
        address: the path of the channel's Unix socket; or ``tls://HOST:PORT,…`` from another
            machine, of which the first reachable one is used.
        secret: the channel's secret.

    Raises:
        SlotsError: the driver cannot be reached, or does not know the secret.
    """

    def __init__(self, address: str, secret: bytes, hello: Message) -> None:
        self._lock = threading.Lock()
        try:
            self._socket = _connected(address)
            _OPEN.add(self)
            self._prove(secret)
            self.send(hello)
        except (OSError, EOFError, ProtocolError, LaunchError) as error:
            raise SlotsError(f"cannot join the driver at {address}: {error}") from error

    def _prove(self, secret: bytes) -> None:
        secured = self._socket
        certificate = secured.certificate if isinstance(secured, TlsSocket) else b""
        self._socket.settimeout(HANDSHAKE_SECONDS)
        theirs, nonce = self._read(NONCE_BYTES), new_nonce()
        self._socket.sendall(proof(secret, "rank", theirs, certificate))
        self._socket.sendall(nonce)
        check_proof(secret, "driver", nonce, self._read(PROOF_BYTES), certificate)
        self._socket.settimeout(None)

    def send(self, message: Message) -> None:
        """Send one message. Raises OSError if the driver is gone."""
        data = frame(encode(message))
        with self._lock:
            self._socket.sendall(data)

    def receive(self) -> bytes:
        """The next message, encoded. Raises EOFError or OSError if the driver is gone."""
        return self._read(frame_length(self._read(HEADER.size)))

    def shutdown(self) -> None:
        """End the connection: the driver is notified, and a thread in `receive` gets an error."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _read(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._socket.recv(count - len(parts))
            if not part:
                raise EOFError("the connection was closed")
            parts += part
        return bytes(parts)


_OPEN: WeakSet[RankConnection] = WeakSet()


def _close_in_child() -> None:
    for connection in list(_OPEN):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)


def _connected(address: str) -> socket.socket | TlsSocket:
    if "://" not in address:
        here = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        here.settimeout(HANDSHAKE_SECONDS)
        here.connect(address)
        return here
    problems = []
    for host, port in parse_driver_address(address):
        try:
            plain = socket.create_connection((host, port), HANDSHAKE_SECONDS)
            notice_silence(plain)
            return TlsSocket(plain)
        except OSError as error:
            problems.append(f"{host}:{port}: {error}")
    raise OSError("; ".join(problems))


def notice_silence(connection: socket.socket) -> None:
    """Have the kernel end a connection to a machine that is silent, for example cut off.

    Messages would not do: a rank that is alive may hold the interpreter lock, and then sends none.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", PROBE_SECONDS),
        ("TCP_KEEPINTVL", PROBE_SECONDS),
        ("TCP_KEEPCNT", SILENCE_SECONDS // PROBE_SECONDS - 1),
        ("TCP_USER_TIMEOUT", SILENCE_SECONDS * 1000),  # milliseconds, for sent bytes
    ):
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def join(
    driver: str, token: bytes, wait_seconds: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the first of the driver's addresses that answers.

    Raises LaunchError if none answers in time, or the driver does not know the token.
    """
    addresses = parse_driver_address(driver)
    deadline = asyncio.get_running_loop().time() + wait_seconds
    has_told = False
    while True:
        problems = []
        for host, port in addresses:
            try:
                return await asyncio.wait_for(connect(host, port, token), HANDSHAKE_SECONDS)
            except ProtocolError as error:
                raise LaunchError(f"the driver at {host}:{port} is another one: {error}") from None
            except (OSError, EOFError) as error:
                problems.append(f"{host}:{port}: {str(error) or type(error).__name__}")
        why = "; ".join(problems)
        if asyncio.get_running_loop().time() > deadline:
            raise LaunchError(
                f"no driver answered within {wait_seconds:g} s ({why}): check that "
                "it runs, that its address can be reached from here, and that the token is that "
                "of its run"
            )
        if not has_told:
            logger.info("waiting up to %g s for the driver: %s", wait_seconds, why)
            has_told = True
        await asyncio.sleep(RETRY_SECONDS)


async def connect(
    host: str, port: int, token: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a driver. Both ends prove the token.

    Raises EOFError if the driver has closed the connection, as its token is another; ProtocolError
    if the driver does not know the token, or a relay is between.
    """
    reader, writer = await asyncio.open_connection(host, port, ssl=client_context())
    try:
        secured = writer.get_extra_info("ssl_object")
        certificate = digest_of(secured.getpeercert(binary_form=True))
        theirs, nonce = await reader.readexactly(NONCE_BYTES), new_nonce()
        writer.write(proof(token, "agent", theirs, certificate) + nonce)
        check_proof(token, "driver", nonce, await reader.readexactly(PROOF_BYTES), certificate)
    except BaseException:
        writer.close()
        raise
    return reader, writer
