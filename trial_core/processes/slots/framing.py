"""The channels' wire format: frames, and a handshake that proves that both ends know the secret.

A frame is a 4-byte big-endian length and as many bytes. The handshake precedes all messages. For
a rank, and likewise for the agent of a node::

    driver → rank   nonce of the driver
    rank → driver   HMAC(secret, "rank", nonce of the driver) + nonce of the rank
    driver → rank   HMAC(secret, "driver", nonce of the rank)

The HMAC uses SHA-256. Between machines it also covers the digest of the driver's certificate, as
each end has it or sees it. So both ends refuse a stranger between them who shows another
certificate. The frames of an unauthenticated peer are limited to a few bytes.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import struct
from collections.abc import Callable

# Timeout of the whole handshake.
HANDSHAKE_SECONDS = 10.0
NONCE_BYTES = 32
PROOF_BYTES = 32
HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 256 * 2**20


class ProtocolError(Exception):
    """The other end violates the protocol, or does not know the secret."""


def frame(payload: bytes) -> bytes:
    if len(payload) > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"a message of {len(payload)} bytes is over the channel's limit of {MAX_FRAME_BYTES}; "
            "return numbers as metrics, not whole tensors"
        )
    return HEADER.pack(len(payload)) + payload


def frame_length(header: bytes, limit_bytes: int = MAX_FRAME_BYTES) -> int:
    (length,) = HEADER.unpack(header)
    if length > limit_bytes:
        raise ProtocolError(f"a frame of {length} bytes is over the limit of {limit_bytes}")
    return int(length)


def new_nonce() -> bytes:
    """Random bytes that the other end has to sign."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(secret: bytes, role: str, nonce: bytes, certificate: bytes = b"") -> bytes:
    """The HMAC of `nonce`, and of the digest of the driver's certificate, if there is one."""
    return hmac.digest(secret, role.encode() + nonce + certificate, "sha256")


def check_proof(
    secret: bytes, role: str, nonce: bytes, seen: bytes, certificate: bytes = b""
) -> None:
    """Raise ProtocolError unless `seen` is the correct proof."""
    if not hmac.compare_digest(proof(secret, role, nonce, certificate), seen):
        raise ProtocolError(f"the {role} does not know this run's secret")


async def read_frame(
    reader: asyncio.StreamReader,
    heard: Callable[[], None] = lambda: None,
    limit_bytes: int = MAX_FRAME_BYTES,
) -> bytes:
    """The next frame's payload.

    Args:
        heard: called whenever bytes come, since a large frame on a slow network is not silence.

    Raises:
        EOFError, OSError: the connection has ended.
        ProtocolError: the frame is too long.
    """

    async def read(count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = await reader.read(count - len(data))
            if not part:
                raise EOFError("the connection was closed")
            data += part
            heard()
        return bytes(data)

    return await read(frame_length(await read(HEADER.size), limit_bytes))
