"""How bytes cross a channel: frames, and the proof that both ends know the run's secret.

A frame is a 4-byte big-endian length and that many bytes. The handshake, before any message::

    driver → rank   nonce of the driver
    rank → driver   HMAC(secret, "rank", nonce of the driver) + nonce of the rank
    driver → rank   HMAC(secret, "driver", nonce of the rank)

Both proofs use SHA-256. Frames of a peer that has not proved itself are held to a few bytes.
"""

from __future__ import annotations

import hmac
import secrets
import struct

# Either end gives the other so long for the whole handshake.
HANDSHAKE_SECONDS = 10.0
NONCE_BYTES = 32
PROOF_BYTES = 32
HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 256 * 2**20


class ProtocolError(Exception):
    """The other end does not speak this protocol, or does not know the secret."""


def frame(payload: bytes) -> bytes:
    """`payload` with its length in front."""
    if len(payload) > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"a message of {len(payload)} bytes is over the channel's limit of {MAX_FRAME_BYTES}; "
            "are whole tensors returned as metrics?"
        )
    return HEADER.pack(len(payload)) + payload


def frame_length(header: bytes, limit_bytes: int = MAX_FRAME_BYTES) -> int:
    """The payload's length that a frame's header announces."""
    (length,) = HEADER.unpack(header)
    if length > limit_bytes:
        raise ProtocolError(f"a frame of {length} bytes is over the limit of {limit_bytes}")
    return int(length)


def new_nonce() -> bytes:
    """Fresh random bytes for the other end to sign."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(secret: bytes, role: str, nonce: bytes) -> bytes:
    """What only somebody who knows the secret can say about `nonce`."""
    return hmac.digest(secret, role.encode() + nonce, "sha256")


def check_proof(secret: bytes, role: str, nonce: bytes, seen: bytes) -> None:
    """Raise ProtocolError unless `seen` is the right proof."""
    if not hmac.compare_digest(proof(secret, role, nonce), seen):
        raise ProtocolError(f"the {role} does not know this run's secret")
