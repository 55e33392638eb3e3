"""Frames, and the proofs of the handshake."""

from __future__ import annotations

import pytest

from trial_core.processes.slots.framing import (
    HEADER,
    MAX_FRAME_BYTES,
    ProtocolError,
    check_proof,
    frame,
    frame_length,
    new_nonce,
    proof,
)


def test_a_frame_begins_with_its_length() -> None:
    """The header has the payload's length."""
    framed = frame(b"hello")
    assert frame_length(framed[: HEADER.size]) == 5
    assert framed[HEADER.size :] == b"hello"


def test_an_oversized_frame_is_refused_before_it_is_read() -> None:
    """So a peer cannot make this process allocate too much memory."""
    with pytest.raises(ProtocolError, match="over the limit"):
        frame_length(HEADER.pack(MAX_FRAME_BYTES + 1))


def test_a_wrong_proof_is_refused() -> None:
    """Made with another secret, or for the other role."""
    nonce = new_nonce()
    check_proof(b"secret", "rank", nonce, proof(b"secret", "rank", nonce))
    for wrong in (proof(b"guess", "rank", nonce), proof(b"secret", "driver", nonce)):
        with pytest.raises(ProtocolError, match="does not know"):
            check_proof(b"secret", "rank", nonce, wrong)
