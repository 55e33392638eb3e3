"""The channel to the ranks: one authenticated connection per rank.

It listens on a Unix socket for the ranks of this machine. If the driver has started ranks on other
machines, their node's agent relays their messages (`trial_core/processes/nodes`). Ranks of other
machines that the driver has not started connect to it over TCP with TLS. Its event loop has a
separate thread, so it receives answers, events and disconnects at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shutil
import socket
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from trial_core.errors import LaunchError
from trial_core.messages import (
    FromRank,
    Hello,
    Message,
    Peer,
    decode_from_rank,
    decode_hello,
    encode,
)
from trial_core.processes.slots.acceptor import Acceptor
from trial_core.processes.slots.addresses import ListenAddress
from trial_core.processes.slots.connection import notice_silence
from trial_core.processes.slots.framing import ProtocolError, frame, read_frame
from trial_core.processes.slots.tls import make_certificate

logger = logging.getLogger(__name__)

HELLO_MAX_BYTES = 4096
MIN_BACKLOG = 128
MAX_SOCKET_FOLDER_CHARACTERS = 90  # the whole path may have about 108
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of a Unix socket's other end, as Linux gives them."""


class Listener(Protocol):
    """Receives the channel's events. Called in the channel's thread; must return at once."""

    def rank_joined(self, peer: Peer) -> None: ...

    def message_received(self, rank: int, message: FromRank) -> None: ...

    def rank_disconnected(self, rank: int, protocol_error: str | None) -> None:
        """`protocol_error`: the error in the rank's last message, or None."""

    def node_lost(self, ranks: Sequence[int], why: str) -> None:
        """A machine with these ranks is lost."""


class Channel:
    """Listens for ranks and exchanges messages with them.

    Args:
        listen: where ranks of other machines join; None if they cannot.

    Attributes:
        address: the path of the Unix socket.
        remote_address: the address of `listen`.

    Raises:
        LaunchError: it cannot listen.
    """

    def __init__(
        self, ranks: range, listener: Listener, listen: ListenAddress | None = None
    ) -> None:
        self.secret = secrets.token_bytes(32)
        self._ranks = ranks
        self._listener = listener
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._folder = _socket_folder()
        self._acceptor = Acceptor(
            "trialflow-channel", self.secret, "rank", HELLO_MAX_BYTES, self._admit, self._talk,
            len(ranks),
        )  # fmt: skip
        self.address = str(self._folder / "channel")
        self.remote_address: str | None = None
        self._is_closed = False
        try:
            here = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            here.bind(self.address)
            here.listen(MIN_BACKLOG + len(ranks))  # a full backlog refuses a rank at once
            self._acceptor.listen(here)
            if listen is not None:
                listening, self.remote_address = listen.open()
                self._acceptor.listen(listening, make_certificate())
        except OSError as error:
            self.close()
            raise LaunchError(f"cannot listen for ranks in {self._folder}: {error}") from error
        except LaunchError:
            self.close()
            raise

    def send(self, message: Message, rank: int | None = None) -> None:
        """Send `message` to every joined rank, or to the given one."""
        self.send_encoded(encode(message), rank)

    def send_encoded(self, data: bytes, rank: int | None = None) -> None:
        self._acceptor.call(self._write, frame(data), rank)

    def close(self) -> None:
        """Close all connections and stop listening; ranks that still run then exit."""
        if self._is_closed:
            return
        self._is_closed = True
        self._acceptor.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------------ the loop's thread

    def _write(self, data: bytes, rank: int | None) -> None:
        for joined, writer in self._writers.items():
            if rank in (None, joined):
                writer.write(data)

    def _admit(self, data: bytes, writer: asyncio.StreamWriter) -> Hello:
        hello = decode_hello(data)
        if hello.rank not in self._ranks:
            raise ProtocolError(f"rank {hello.rank} cannot join the ranks {list(self._ranks)}")
        if hello.rank in self._writers:
            raise ProtocolError(f"rank {hello.rank} has already joined")
        self._writers[hello.rank] = writer
        return hello

    async def _talk(
        self, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        connection = writer.get_extra_info("socket")  # None if it has been closed already
        is_unix = connection is not None and connection.family == socket.AF_UNIX
        peer = Peer(
            rank=hello.rank,
            pid=hello.pid,
            host=hello.host,
            is_here=is_unix and _process_at(connection) == hello.pid,
            is_interactive=hello.is_interactive,
        )
        protocol_error: str | None = None
        try:
            if connection is not None and not is_unix:
                notice_silence(connection)
            self._listener.rank_joined(peer)
            while True:
                message = decode_from_rank(await read_frame(reader))
                try:
                    self._listener.message_received(peer.rank, message)
                except Exception:
                    # A callback of the driver, such as a display, has failed. Training continues.
                    logger.exception("a message of rank %d could not be handled", peer.rank)
        except (EOFError, ConnectionError):
            pass
        except OSError as error:
            # Its machine or the network is silent: a process that ends closes its connections.
            self._listener.node_lost([peer.rank], f"its connection has broken: {error}")
        except (ProtocolError, msgspec.MsgspecError) as error:
            protocol_error = f"sent an invalid message: {error}"
        finally:
            # Before `close`, which makes the rank exit and so would report another cause.
            self._listener.rank_disconnected(peer.rank, protocol_error)
            self._writers.pop(peer.rank, None)


def _process_at(connection: socket.socket) -> int | None:
    """The process at the other end of a Unix socket, as this process sees it; None if unknown."""
    with contextlib.suppress(AttributeError, OSError):  # only Linux tells
        found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return int(_CREDENTIALS.unpack(found)[0])
    return None


def _socket_folder() -> Path:
    """A private folder with a path short enough for a Unix socket."""
    folder = Path(tempfile.mkdtemp(prefix="trialflow-"))
    if len(str(folder)) > MAX_SOCKET_FOLDER_CHARACTERS:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="trialflow-", dir="/tmp"))
    return folder
