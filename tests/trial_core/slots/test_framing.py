"""Frames and the handshake's proofs."""

from __future__ import annotations

import pytest

from trial_core.slots.framing import (
    HEADER,
    MAX_FRAME_BYTES,
    ProtocolError,
    check_proof,
    frame,
    frame_length,
    new_nonce,
    proof,
)


def test_a_frame_announces_its_payload() -> None:
    """The header of a frame says how long its payload is."""
    framed = frame(b"hello")
    assert frame_length(framed[: HEADER.size]) == 5
    assert framed[HEADER.size :] == b"hello"


def test_an_oversized_frame_is_refused_before_it_is_read() -> None:
    """A header that announces too much is refused, so nobody can make us allocate it."""
    with pytest.raises(ProtocolError, match="over the limit"):
        frame_length(HEADER.pack(MAX_FRAME_BYTES + 1))


def test_only_the_secret_proves() -> None:
    """A proof made with another secret, or for the other role, is refused."""
    nonce = new_nonce()
    check_proof(b"secret", "rank", nonce, proof(b"secret", "rank", nonce))
    for wrong in (proof(b"guess", "rank", nonce), proof(b"secret", "driver", nonce)):
        with pytest.raises(ProtocolError, match="does not know"):
            check_proof(b"secret", "rank", nonce, wrong)
