"""What a stranger may say to a driver or a rank: the connection ends, and nothing else does."""

from __future__ import annotations

import contextlib
import logging
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import strategies as st

from tests.support.strategies import fuzz, spoilt
from tests.trial_core.processes.slots.test_channel import DEADLINE_SECONDS, RecordingListener, hello
from trial_core.errors import SlotsError
from trial_core.messages import (
    Answer,
    Done,
    Envelope,
    LogLines,
    Ping,
    decode_from_driver,
    encode,
)
from trial_core.processes.slots.channel import Channel
from trial_core.processes.slots.connection import RankConnection
from trial_core.processes.slots.framing import NONCE_BYTES, PROOF_BYTES, ProtocolError, frame, proof

SECRET = b"the secret of the run"
OTHERS = [b"garbage", b"", b"\x85\xa4type\xa2\xff\xfe", b"\x91" * 3000, encode(hello(1))]
OVERSIZED = b"\xff\xff\xff\xff"
PROOFS = st.sampled_from(["right", "right", "right", "reflected", "none", "short"])


def frames(*messages: bytes) -> st.SearchStrategy[bytes]:
    """Some frames of these messages and of others, in any order, then perhaps a broken one."""
    some = st.lists(st.sampled_from([*messages, *messages, *OTHERS]), max_size=4)
    spoilt_frames = some.map(lambda each: b"".join(map(frame, each))).flatmap(spoilt)
    return st.tuples(spoilt_frames, st.sampled_from([b"", b"", OVERSIZED, b"\0"])).map(b"".join)


@contextlib.contextmanager
def no_error_of_asyncio() -> Iterator[None]:
    """Fail if an exception reached the event loop, which only logs it."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("asyncio").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("asyncio").removeHandler(handler)
    assert [record.getMessage() for record in records] == []


def rest_of(connection: socket.socket) -> bytes:
    """What the other end sends until it closes the connection."""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        connection.shutdown(socket.SHUT_WR)
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(4096):
            received += part
    return received


def proof_of_kind(kind: str, secret: bytes, role: str, nonce: bytes) -> bytes:
    """The right proof, the nonce itself, nothing, or a part of the right one."""
    right = proof(secret, role, nonce)
    return {"right": right, "reflected": nonce, "none": b"", "short": right[:-1]}[kind]


@fuzz(
    40,
    kind=PROOFS,
    nonce=st.binary(min_size=NONCE_BYTES - 1, max_size=NONCE_BYTES),
    said=frames(encode(hello(0)), encode(LogLines(lines=["a"])), encode(Answer(number=1))),
    begins_well=st.booleans(),
)
def test_a_stranger_ends_only_its_own_connection(
    kind: str, nonce: bytes, said: bytes, begins_well: bool
) -> None:
    """The driver closes it, and a rank that knows the secret joins afterwards."""
    listener = RecordingListener()
    channel = Channel(range(1), listener)
    with no_error_of_asyncio():
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(DEADLINE_SECONDS)
            stranger.connect(channel.address)
            shown = proof_of_kind(kind, channel.secret, "rank", stranger.recv(NONCE_BYTES))
            first = frame(encode(hello(0))) if begins_well else b""
            with contextlib.suppress(BrokenPipeError):
                stranger.sendall(shown + nonce + first + said)
            rest_of(stranger)
        while not listener.events.empty():
            assert listener.next()[1] == 0  # type: ignore[index]
        rank = RankConnection(channel.address, channel.secret, hello(0))
        assert listener.next() == ("joined", 0)
        rank.close()
        assert listener.next() == ("left", 0, None)
        channel.close()


@pytest.mark.parametrize("said", OTHERS)
def test_the_driver_names_an_invalid_message(said: bytes) -> None:
    """Whatever is wrong with it, the listener gets the reason."""
    listener = RecordingListener()
    channel = Channel(range(1), listener)
    rank = RankConnection(channel.address, channel.secret, hello(0))
    assert listener.next() == ("joined", 0)
    rank._socket.sendall(frame(said))
    kind, number, reason = listener.next()  # type: ignore[misc]
    channel.close()
    rank.close()
    assert (kind, number) == ("left", 0)
    assert "sent an invalid message: " in reason


@fuzz(
    40,
    nonce=st.binary(min_size=NONCE_BYTES, max_size=NONCE_BYTES),
    kind=PROOFS,
    said=frames(
        encode(Envelope(number=1, request=Ping())), encode(Answer(number=1, result=Done()))
    ),
)
def test_a_rank_ends_a_connection_that_is_no_drivers(nonce: bytes, kind: str, said: bytes) -> None:
    """With the errors on which it exits."""
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
        path = Path(folder, "channel")
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            listening.listen()
            thread = threading.Thread(target=play_driver, args=(listening, nonce, kind, said))
            thread.start()
            with contextlib.suppress(SlotsError):
                rank = RankConnection(str(path), SECRET, hello(0))
                with contextlib.suppress(EOFError, OSError, ProtocolError, msgspec.MsgspecError):
                    while True:
                        decode_from_driver(rank.receive())
                rank.close()
            thread.join()


def play_driver(listening: socket.socket, nonce: bytes, kind: str, said: bytes) -> None:
    connection, _ = listening.accept()
    with connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.settimeout(DEADLINE_SECONDS)
        connection.sendall(nonce)
        seen = b""
        while len(seen) < PROOF_BYTES + NONCE_BYTES:
            seen += connection.recv(PROOF_BYTES + NONCE_BYTES - len(seen))
        connection.sendall(proof_of_kind(kind, SECRET, "driver", seen[PROOF_BYTES:]) + said)
        connection.shutdown(socket.SHUT_WR)  # the rank may not close before
