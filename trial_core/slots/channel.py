"""The channel to the ranks of this machine: one authenticated connection per rank.

It listens on a Unix socket; the node's agent relays its messages if the driver is on another
machine (`trial_core/nodes`). Its event loop has a separate thread, so it receives answers, events
and disconnects whatever the process is doing.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import tempfile
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from trial_core.errors import LaunchError
from trial_core.messages import (
    FromRank,
    Message,
    Peer,
    decode_from_rank,
    decode_hello,
    encode,
)
from trial_core.slots.framing import (
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

logger = logging.getLogger(__name__)

HELLO_MAX_BYTES = 4096
MAX_SOCKET_FOLDER_CHARACTERS = 90  # the whole path may have about 108


class Listener(Protocol):
    """Receives the channel's events. Called in the channel's thread; must return at once."""

    def rank_joined(self, peer: Peer) -> None: ...

    def message_received(self, rank: int, message: FromRank) -> None: ...

    def rank_disconnected(self, rank: int, protocol_error: str | None) -> None:
        """`protocol_error`: what was wrong with the rank's last message; None: nothing."""

    def node_lost(self, ranks: Sequence[int], why: str) -> None:
        """A machine with these ranks is lost."""


class Channel:
    """Listens for ranks of this machine and exchanges messages with them.

    Args:
        ranks: those that may join.
    """

    def __init__(self, ranks: range, listener: Listener) -> None:
        self.secret = secrets.token_bytes(32)
        self._ranks = ranks
        self._listener = listener
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._folder = _socket_folder()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="trialflow-channel", daemon=True
        )
        self._thread.start()
        try:
            self._server, self.address = self._run(self._listen())
        except OSError as error:
            self.close()
            raise LaunchError(f"cannot listen for ranks in {self._folder}: {error}") from error

    def send(self, message: Message) -> None:
        """Send `message` to every joined rank."""
        self.send_encoded(encode(message))

    def send_encoded(self, data: bytes) -> None:
        """Send an encoded message to every joined rank."""
        self._loop.call_soon_threadsafe(self._write_all, frame(data))

    def close(self) -> None:
        """Close all connections and stop listening. Ranks that still run then exit."""
        if not self._thread.is_alive():
            return
        self._run(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------------ the loop's thread

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _listen(self) -> tuple[asyncio.AbstractServer, str]:
        path = str(self._folder / "channel")
        return await asyncio.start_unix_server(self._serve, path), path

    async def _shut(self) -> None:
        if hasattr(self, "_server"):
            self._server.close()
        for writer in self._writers.values():
            writer.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _write_all(self, data: bytes) -> None:
        for writer in self._writers.values():
            writer.write(data)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            peer = await asyncio.wait_for(self._admit(reader, writer), HANDSHAKE_SECONDS)
        except (ProtocolError, OSError, EOFError, asyncio.TimeoutError, msgspec.MsgspecError) as e:
            logger.warning("rejected a connection to the slot group's channel: %s", e)
            writer.close()
            return
        protocol_error: str | None = None
        try:
            self._listener.rank_joined(peer)
            while True:
                data = await reader.readexactly(frame_length(await reader.readexactly(HEADER.size)))
                self._dispatch(peer.rank, decode_from_rank(data))
        except (EOFError, OSError):
            pass
        except (ProtocolError, msgspec.MsgspecError) as error:
            protocol_error = f"sent an invalid message: {error}"
        except asyncio.CancelledError:
            return  # the channel is being closed
        finally:
            # Before `close`, which makes the rank exit and so would report another cause.
            self._listener.rank_disconnected(peer.rank, protocol_error)
            self._writers.pop(peer.rank, None)
            writer.close()

    def _dispatch(self, rank: int, message: FromRank) -> None:
        try:
            self._listener.message_received(rank, message)
        except Exception:
            # A callback of the driver, such as a display, has failed. Training continues.
            logger.exception("a message of rank %d could not be handled", rank)

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Peer:
        nonce = new_nonce()
        writer.write(nonce)
        check_proof(self.secret, "rank", nonce, await reader.readexactly(PROOF_BYTES))
        writer.write(proof(self.secret, "driver", await reader.readexactly(NONCE_BYTES)))
        length = frame_length(await reader.readexactly(HEADER.size), HELLO_MAX_BYTES)
        hello = decode_hello(await reader.readexactly(length))
        if hello.rank not in self._ranks:
            raise ProtocolError(f"rank {hello.rank} cannot join the ranks {list(self._ranks)}")
        if hello.rank in self._writers:
            raise ProtocolError(f"rank {hello.rank} has already joined")
        self._writers[hello.rank] = writer
        return Peer(rank=hello.rank, pid=hello.pid, host=hello.host)


def _socket_folder() -> Path:
    """A private folder with a path short enough for a Unix socket."""
    folder = Path(tempfile.mkdtemp(prefix="trialflow-"))
    if len(str(folder)) > MAX_SOCKET_FOLDER_CHARACTERS:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="trialflow-", dir="/tmp"))
    return folder
