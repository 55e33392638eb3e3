"""The channel: which ranks may join, and what the driver receives."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator, Sequence

import pytest

from trial_core.errors import SlotsError
from trial_core.messages import (
    Answer,
    BatchesTrained,
    Done,
    Envelope,
    Hello,
    LogLines,
    Peer,
    Ping,
    decode_from_driver,
    encode,
)
from trial_core.slots.channel import Channel
from trial_core.slots.connection import RankConnection
from trial_core.slots.framing import frame, proof

DEADLINE_SECONDS = 10.0


class RecordingListener:
    """A listener that keeps its events."""

    def __init__(self) -> None:
        self.events: queue.Queue[object] = queue.Queue()

    def rank_joined(self, peer: Peer) -> None:
        self.events.put(("joined", peer.rank))

    def message_received(self, rank: int, message: Answer | BatchesTrained | LogLines) -> None:
        self.events.put(("received", rank, message))

    def rank_disconnected(self, rank: int, protocol_error: str | None) -> None:
        self.events.put(("left", rank, protocol_error))

    def node_lost(self, ranks: Sequence[int], why: str) -> None:
        self.events.put(("lost", ranks, why))

    def next(self) -> object:
        return self.events.get(timeout=DEADLINE_SECONDS)


@pytest.fixture
def channel() -> Iterator[tuple[Channel, RecordingListener]]:
    listener = RecordingListener()
    channel = Channel(range(2), listener)
    yield channel, listener
    channel.close()


def hello(rank: int) -> Hello:
    return Hello(rank=rank, pid=1, host="here")


def test_requests_and_answers_cross(channel: tuple[Channel, RecordingListener]) -> None:
    """A rank with the secret joins, receives a request and answers it."""
    driver, listener = channel
    rank = RankConnection(driver.address, driver.secret, hello(1))
    assert listener.next() == ("joined", 1)
    driver.send(Envelope(number=7, request=Ping()))
    assert decode_from_driver(rank.receive()) == Envelope(number=7, request=Ping())
    rank.send(Answer(number=7, result=Done()))
    assert listener.next() == ("received", 1, Answer(number=7, result=Done()))
    rank.close()


def test_a_closed_connection_is_noticed(channel: tuple[Channel, RecordingListener]) -> None:
    """The kernel closes a dead process's connection, too."""
    driver, listener = channel
    RankConnection(driver.address, driver.secret, hello(0)).close()
    assert listener.next() == ("joined", 0)
    assert listener.next() == ("left", 0, None)


def test_a_peer_without_the_secret_is_rejected(channel: tuple[Channel, RecordingListener]) -> None:
    """The rank raises, and the driver sees no event."""
    driver, listener = channel
    with pytest.raises(SlotsError, match="cannot join the driver"):
        RankConnection(driver.address, b"guess", hello(0))
    assert listener.events.empty()


@pytest.mark.parametrize("rank", [2, -1])
def test_a_rank_out_of_range_is_rejected(
    channel: tuple[Channel, RecordingListener], rank: int
) -> None:
    """Only ranks 0 to world_size - 1 join."""
    driver, listener = channel
    connection = RankConnection(driver.address, driver.secret, hello(rank))
    with pytest.raises(EOFError):
        connection.receive()
    assert listener.events.empty()


def test_a_duplicate_rank_is_rejected(
    channel: tuple[Channel, RecordingListener],
) -> None:
    """The first process with that rank stays connected."""
    driver, listener = channel
    first = RankConnection(driver.address, driver.secret, hello(0))
    assert listener.next() == ("joined", 0)
    second = RankConnection(driver.address, driver.secret, hello(0))
    with pytest.raises(EOFError):
        second.receive()
    first.send(LogLines(lines=["still here"]))
    assert listener.next() == ("received", 0, LogLines(lines=["still here"]))
    first.close()


def test_an_invalid_message_ends_the_connection() -> None:
    """The listener gets the reason."""
    listener = RecordingListener()
    channel = Channel(range(1), listener)
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(channel.address)
        raw.sendall(proof(channel.secret, "rank", raw.recv(32)) + bytes(32))
        raw.recv(32)
        raw.sendall(frame(encode(hello(0))))
        assert listener.next() == ("joined", 0)
        raw.sendall(frame(b"garbage"))
        kind, rank, reason = listener.next()  # type: ignore[misc]
    channel.close()
    assert (kind, rank) == ("left", 0)
    assert "sent an invalid message: " in reason
