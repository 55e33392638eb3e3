"""The channel: who may join, and what becomes of what they say."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator

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


class Hearing:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: queue.Queue[object] = queue.Queue()

    def rank_joined(self, peer: Peer) -> None:
        self.heard.put(("joined", peer.rank))

    def rank_said(self, rank: int, message: Answer | BatchesTrained | LogLines) -> None:
        self.heard.put(("said", rank, message))

    def rank_left(self, rank: int, why: str) -> None:
        self.heard.put(("left", rank, why))

    def next(self) -> object:
        return self.heard.get(timeout=DEADLINE_SECONDS)


@pytest.fixture(params=[None, "127.0.0.1"], ids=["unix", "tcp"])
def channel(request: pytest.FixtureRequest) -> Iterator[tuple[Channel, Hearing]]:
    hearing = Hearing()
    channel = Channel(2, hearing, request.param)
    yield channel, hearing
    channel.close()


def hello(rank: int) -> Hello:
    return Hello(rank=rank, pid=1, host="here")


def test_requests_and_answers_cross(channel: tuple[Channel, Hearing]) -> None:
    """A rank that knows the secret joins, gets requests and answers them."""
    driver, hearing = channel
    rank = RankConnection(driver.address, driver.secret, hello(1))
    assert hearing.next() == ("joined", 1)
    driver.send(Envelope(number=7, request=Ping()))
    assert decode_from_driver(rank.receive()) == Envelope(number=7, request=Ping())
    rank.send(Answer(number=7, result=Done()))
    assert hearing.next() == ("said", 1, Answer(number=7, result=Done()))
    rank.close()


def test_a_rank_that_ends_is_noticed(channel: tuple[Channel, Hearing]) -> None:
    """Closing the connection, as the kernel does for a dead process, is heard at once."""
    driver, hearing = channel
    RankConnection(driver.address, driver.secret, hello(0)).close()
    assert hearing.next() == ("joined", 0)
    assert hearing.next() == ("left", 0, None)


def test_a_stranger_is_turned_away(channel: tuple[Channel, Hearing]) -> None:
    """Without the secret nobody joins, and a rank does not serve a driver that lacks it."""
    driver, hearing = channel
    with pytest.raises(SlotsError, match="cannot join the driver"):
        RankConnection(driver.address, b"guess", hello(0))
    assert hearing.heard.empty()


@pytest.mark.parametrize("rank", [2, -1])
def test_a_rank_out_of_range_is_turned_away(channel: tuple[Channel, Hearing], rank: int) -> None:
    """Only ranks 0 to world_size - 1 may join."""
    driver, hearing = channel
    connection = RankConnection(driver.address, driver.secret, hello(rank))
    with pytest.raises(EOFError):
        connection.receive()
    assert hearing.heard.empty()


def test_a_second_rank_of_the_same_number_is_turned_away(
    channel: tuple[Channel, Hearing],
) -> None:
    """Two processes cannot both be rank 0; the first stays."""
    driver, hearing = channel
    first = RankConnection(driver.address, driver.secret, hello(0))
    assert hearing.next() == ("joined", 0)
    second = RankConnection(driver.address, driver.secret, hello(0))
    with pytest.raises(EOFError):
        second.receive()
    first.send(LogLines(lines=["still here"]))
    assert hearing.next() == ("said", 0, LogLines(lines=["still here"]))
    first.close()


def test_garbage_after_joining_ends_the_connection() -> None:
    """A peer that sends no message is dropped, with what was wrong."""
    hearing = Hearing()
    channel = Channel(1, hearing, "127.0.0.1")
    host, _, port = channel.address.removeprefix("tcp:").rpartition(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(proof(channel.secret, "rank", raw.recv(32)) + bytes(32))
        raw.recv(32)
        raw.sendall(frame(encode(hello(0))))
        assert hearing.next() == ("joined", 0)
        raw.sendall(frame(b"no message"))
        kind, rank, why = hearing.next()  # type: ignore[misc]
    channel.close()
    assert (kind, rank) == ("left", 0)
    assert "no message" in why
