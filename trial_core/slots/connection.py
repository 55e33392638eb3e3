"""A rank's end of the channel. Blocking; does not import torch."""

from __future__ import annotations

import socket
import threading

from trial_core.errors import SlotsError
from trial_core.messages import Message, encode
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


class RankConnection:
    """A rank's connection to the driver. Any thread may call `send`.

    Args:
        address: the path of the channel's Unix socket.
        secret: the run's secret.

    Raises:
        SlotsError: the driver cannot be reached, or does not know the secret.
    """

    def __init__(self, address: str, secret: bytes, hello: Message) -> None:
        self._lock = threading.Lock()
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.settimeout(HANDSHAKE_SECONDS)
            self._socket.connect(address)
            self._socket.sendall(proof(secret, "rank", self._read(NONCE_BYTES)))
            nonce = new_nonce()
            self._socket.sendall(nonce)
            check_proof(secret, "driver", nonce, self._read(PROOF_BYTES))
            self._socket.settimeout(None)
            self.send(hello)
        except (OSError, EOFError, ProtocolError) as error:
            raise SlotsError(f"cannot join the driver at {address}: {error}") from error

    def send(self, message: Message) -> None:
        """Send one message. Raises OSError if the driver is gone."""
        data = frame(encode(message))
        with self._lock:
            self._socket.sendall(data)

    def receive(self) -> bytes:
        """The next message, encoded. Raises EOFError or OSError if the driver is gone."""
        return self._read(frame_length(self._read(HEADER.size)))

    def close(self) -> None:
        """Close the connection; the driver is notified."""
        self._socket.close()

    def _read(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._socket.recv(count - len(parts))
            if not part:
                raise EOFError("the connection was closed")
            parts += part
        return bytes(parts)
