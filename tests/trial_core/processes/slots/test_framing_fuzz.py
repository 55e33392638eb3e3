"""Any header and any proof is accepted or refused with a ProtocolError."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import strategies as st

from tests.support.strategies import fuzz
from trial_core.processes.slots.framing import (
    HEADER,
    PROOF_BYTES,
    ProtocolError,
    check_proof,
    frame,
    frame_length,
    proof,
)


@fuzz(30, header=st.binary(min_size=HEADER.size, max_size=HEADER.size), limit=st.integers(0, 2**32))
def test_a_length_is_at_most_the_limit(header: bytes, limit: int) -> None:
    """So a peer decides at most so much about this process's memory."""
    with contextlib.suppress(ProtocolError):
        assert frame_length(header, limit) <= limit


@fuzz(20, payload=st.binary(max_size=300))
def test_a_frame_survives(payload: bytes) -> None:
    """Length and payload are what was framed."""
    framed = frame(payload)
    assert frame_length(framed[: HEADER.size]) == len(payload)
    assert framed[HEADER.size :] == payload


@fuzz(20, seen=st.binary(max_size=PROOF_BYTES + 1), nonce=st.binary(max_size=40))
def test_no_other_bytes_are_a_proof(seen: bytes, nonce: bytes) -> None:
    """Of any length."""
    with pytest.raises(ProtocolError, match="does not know"):
        check_proof(b"secret", "rank", nonce, seen)
    check_proof(b"secret", "rank", nonce, proof(b"secret", "rank", nonce))
