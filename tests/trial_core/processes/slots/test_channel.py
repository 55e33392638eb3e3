"""The channel: which ranks may join, and what the driver receives."""

from __future__ import annotations

import os
import queue
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from trial_core.errors import SlotsError
from trial_core.messages import (
    Answer,
    BatchesTrained,
    Done,
    DumpStacks,
    Envelope,
    Hello,
    LogLines,
    PauseSteps,
    Peer,
    Ping,
    RunHook,
    decode_from_driver,
    encode,
)
from trial_core.processes.slots import acceptor
from trial_core.processes.slots.addresses import (
    LOOPBACK_ADDRESS,
    ListenAddress,
    driver_address,
    parse_driver_address,
)
from trial_core.processes.slots.channel import Channel
from trial_core.processes.slots.connection import RankConnection
from trial_core.processes.slots.framing import NONCE_BYTES, PROOF_BYTES, frame, new_nonce, proof
from trial_core.processes.slots.tls import client_context, make_certificate

DEADLINE_SECONDS = 10.0
MANY_RANKS = 300


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


@dataclass
class Opened:
    """A channel for two ranks, and where they join: on its machine, or as on another one."""

    driver: Channel
    listener: RecordingListener
    address: str


@pytest.fixture(params=["here", "remote"])
def channel(request: pytest.FixtureRequest) -> Iterator[Opened]:
    listener = RecordingListener()
    driver = Channel(range(2), listener, ListenAddress(LOOPBACK_ADDRESS))
    address = driver.address if request.param == "here" else driver.remote_address
    yield Opened(driver, listener, address or "")
    driver.close()


@contextmanager
def raw_connection(channel: Opened) -> Iterator[socket.socket]:
    """A connection to the driver, before any proof."""
    if channel.address == channel.driver.address:
        with socket.socket(socket.AF_UNIX) as here:
            here.connect(channel.address)
            yield here
        return
    ((host, port),) = parse_driver_address(channel.address)
    with (
        socket.create_connection((host, port)) as plain,
        client_context().wrap_socket(plain) as secured,
    ):
        yield secured


def hello(rank: int) -> Hello:
    return Hello(rank=rank, pid=1, host="here")


def test_requests_and_answers_cross(channel: Opened) -> None:
    """A rank with the secret joins, receives a request and answers it."""
    driver, listener = channel.driver, channel.listener
    rank = RankConnection(channel.address, driver.secret, hello(1))
    assert listener.next() == ("joined", 1)
    driver.send(Envelope(number=7, request=Ping()))
    assert decode_from_driver(rank.receive()) == Envelope(number=7, request=Ping())
    rank.send(Answer(number=7, result=Done()))
    assert listener.next() == ("received", 1, Answer(number=7, result=Done()))
    rank.close()


def test_a_closed_connection_is_noticed(channel: Opened) -> None:
    """The kernel closes a dead process's connection, too."""
    driver, listener = channel.driver, channel.listener
    RankConnection(channel.address, driver.secret, hello(0)).close()
    assert listener.next() == ("joined", 0)
    assert listener.next() == ("left", 0, None)


def test_what_a_rank_says_before_it_ends_arrives() -> None:
    """Also if the driver writes to it first, which fails, and although it has not read all."""
    can_read, listener = threading.Event(), RecordingListener()
    driver = Channel(range(1), listener)
    with ExitStack() as opened:
        opened.callback(driver.close)
        opened.callback(can_read.set)
        rank = RankConnection(driver.address, driver.secret, hello(0))
        assert listener.next() == ("joined", 0)
        driver.send(Envelope(number=7, request=Ping()))
        driver._acceptor.loop.call_soon_threadsafe(can_read.wait)
        messages = [BatchesTrained(batches=count) for count in range(3)]
        for message in messages:
            rank.send(message)
        rank.close()
        driver.send(Envelope(number=8, request=Ping()))
        can_read.set()
        assert [listener.next() for _ in messages] == [("received", 0, each) for each in messages]
        assert listener.next() == ("left", 0, None)


def test_a_peer_without_the_secret_is_rejected(channel: Opened) -> None:
    """The rank raises, and the driver sees no event."""
    with pytest.raises(SlotsError, match="cannot join the driver"):
        RankConnection(channel.address, b"guess", hello(0))
    assert channel.listener.events.empty()


def test_a_peer_that_proves_nothing_in_time_is_disconnected(
    channel: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it begins its proof. It is no longer counted."""
    monkeypatch.setattr(acceptor, "HANDSHAKE_SECONDS", 1.0)
    with raw_connection(channel) as raw:
        raw.settimeout(DEADLINE_SECONDS)
        assert len(raw.recv(NONCE_BYTES)) == NONCE_BYTES
        raw.sendall(b"x")
        assert raw.recv(1) == b""
    assert channel.driver._acceptor._unproven == 0
    assert channel.listener.events.empty()


def test_all_ranks_may_join_at_once(channel: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of 64 machines, which torchrun starts together. They are no strangers."""
    monkeypatch.setattr(acceptor, "MAX_UNPROVEN", 1)
    with raw_connection(channel) as first, raw_connection(channel) as second:
        for each in (first, second):
            assert len(each.recv(NONCE_BYTES)) == NONCE_BYTES
        RankConnection(channel.address, channel.driver.secret, hello(0)).close()
        assert channel.listener.next() == ("joined", 0)


def test_hundreds_of_ranks_connect_while_the_driver_is_busy() -> None:
    """They wait for it. A Unix socket refuses those who find its queue full."""
    if int(Path("/proc/sys/net/core/somaxconn").read_text()) < MANY_RANKS:
        pytest.skip("the kernel's limit is lower")
    driver, is_free = Channel(range(MANY_RANKS), RecordingListener()), threading.Event()
    driver._acceptor.loop.call_soon_threadsafe(is_free.wait)
    with ExitStack() as opened:
        opened.callback(driver.close)
        opened.callback(is_free.set)
        for _ in range(MANY_RANKS):
            here = opened.enter_context(socket.socket(socket.AF_UNIX))
            here.settimeout(DEADLINE_SECONDS)
            here.connect(driver.address)


def test_a_rank_without_the_secret_does_not_join(channel: Opened) -> None:
    """Also if it does not ask whether the driver knows it. The driver says nothing but a nonce."""
    with raw_connection(channel) as raw:
        assert len(raw.recv(NONCE_BYTES)) == NONCE_BYTES
        raw.sendall(bytes(PROOF_BYTES) + new_nonce() + frame(encode(hello(0))))
        with suppress(ConnectionError):
            assert raw.recv(1) == b""
    assert channel.listener.events.empty()


def test_a_driver_without_the_secret_is_told_nothing() -> None:
    """A rank does not say hello to it."""
    said: list[bytes] = []
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{folder}/channel")
        listening.listen()

        def pretend() -> None:
            rank, _ = listening.accept()
            with rank:
                rank.sendall(new_nonce())
                rank.recv(PROOF_BYTES + NONCE_BYTES, socket.MSG_WAITALL)
                rank.sendall(bytes(PROOF_BYTES))
                said.append(rank.recv(1))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(SlotsError, match="the driver does not know this run's secret"):
            RankConnection(f"{folder}/channel", b"secret", hello(0))
        thread.join()
    assert said == [b""]


@pytest.mark.parametrize("rank", [2, -1])
def test_a_rank_out_of_range_is_rejected(channel: Opened, rank: int) -> None:
    """Only ranks 0 to world_size - 1 join."""
    driver, listener = channel.driver, channel.listener
    connection = RankConnection(channel.address, driver.secret, hello(rank))
    with pytest.raises(EOFError):
        connection.receive()
    assert listener.events.empty()


def test_a_duplicate_rank_is_rejected(channel: Opened) -> None:
    """The first process with that rank stays connected."""
    driver, listener = channel.driver, channel.listener
    first = RankConnection(channel.address, driver.secret, hello(0))
    assert listener.next() == ("joined", 0)
    second = RankConnection(channel.address, driver.secret, hello(0))
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


def test_a_message_for_one_rank_reaches_it_alone(channel: Opened) -> None:
    """And one for all reaches all."""
    driver, listener = channel.driver, channel.listener
    ranks = [RankConnection(channel.address, driver.secret, hello(rank)) for rank in (0, 1)]
    for _ in ranks:
        listener.next()
    driver.send(DumpStacks(), rank=1)
    driver.send(PauseSteps())
    assert [decode_from_driver(rank.receive()) for rank in ranks] == [PauseSteps(), DumpStacks()]
    for rank in ranks:
        rank.close()


def test_large_messages_cross_in_both_directions_at_once(channel: Opened) -> None:
    """A thread receives while two others send."""
    driver, listener = channel.driver, channel.listener
    rank = RankConnection(channel.address, driver.secret, hello(0))
    listener.next()
    text = "x" * 10**5
    senders = [
        threading.Thread(
            target=lambda: [rank.send(LogLines(lines=[text])) for _ in range(50)], daemon=True
        )
        for _ in range(2)
    ]
    for sender in senders:
        sender.start()
    hook = RunHook(hook="any", arguments={"text": text})
    for number in range(100):
        driver.send(Envelope(number=number, request=hook))
    received = [decode_from_driver(rank.receive()) for _ in range(100)]
    assert received == [Envelope(number=number, request=hook) for number in range(100)]
    assert [listener.next() for _ in range(100)] == [("received", 0, LogLines(lines=[text]))] * 100
    rank.close()


def test_a_thread_that_receives_learns_that_its_connection_was_shut_down(channel: Opened) -> None:
    """And so does the driver."""
    rank = RankConnection(channel.address, channel.driver.secret, hello(0))
    channel.listener.next()
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(rank.receive)
        rank.shutdown()
        with pytest.raises((EOFError, OSError)):
            receiving.result(DEADLINE_SECONDS)
    assert channel.listener.next() == ("left", 0, None)
    rank.close()


def test_a_forked_child_has_no_copy_of_the_connection(channel: Opened) -> None:
    """The driver sees the end of the rank although the child lives."""
    rank = RankConnection(channel.address, channel.driver.secret, hello(0))
    channel.listener.next()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    rank.close()
    assert channel.listener.next() == ("left", 0, None)
    os.close(writing)
    os.close(reading)
    os.waitpid(child, 0)


def test_the_driver_knows_which_ranks_are_on_its_machine(channel: Opened) -> None:
    """By their connection, which the kernel vouches for: it may send them signals."""
    peers: list[Peer] = []
    joined = threading.Semaphore(0)
    channel.listener.rank_joined = lambda peer: (peers.append(peer), joined.release())  # type: ignore[func-returns-value,method-assign]
    for number, pid in ((0, os.getpid()), (1, 1)):
        rank = RankConnection(
            channel.address, channel.driver.secret, Hello(rank=number, pid=pid, host="here")
        )
        assert joined.acquire(timeout=DEADLINE_SECONDS)
        rank.close()
    is_unix = "://" not in channel.address
    assert [peer.is_here for peer in peers] == [is_unix, False]


@pytest.fixture
def remote() -> Iterator[tuple[Channel, RecordingListener, int]]:
    """A channel for ranks of other machines, and its port."""
    listener = RecordingListener()
    channel = Channel(range(2), listener, ListenAddress(LOOPBACK_ADDRESS))
    ((_, port),) = parse_driver_address(channel.remote_address or "")
    yield channel, listener, port
    channel.close()


@pytest.mark.parametrize("secured", [False, True], ids=["no-tls", "tls"])
def test_a_stranger_from_another_machine_is_refused_and_logged(
    remote: tuple[Channel, RecordingListener, int],
    secured: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It hears nothing but a nonce, and a rank still joins."""
    monkeypatch.setattr(acceptor, "HANDSHAKE_SECONDS", 1.0)
    channel, listener, port = remote
    with socket.create_connection((LOOPBACK_ADDRESS, port), DEADLINE_SECONDS) as plain:
        stranger = client_context().wrap_socket(plain) if secured else plain
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n".ljust(PROOF_BYTES + NONCE_BYTES))
        answer = b""
        while data := stranger.recv(4096):
            answer += data
    assert len(answer) == NONCE_BYTES if secured else answer[:1] != b"\x16"
    assert channel.remote_address is not None
    rank = RankConnection(channel.remote_address, channel.secret, hello(0))
    assert listener.next() == ("joined", 0)
    rank.close()
    assert f"rejected a connection from ('{LOOPBACK_ADDRESS}'" in caplog.text


def test_a_relay_between_rank_and_driver_is_refused_by_both(
    remote: tuple[Channel, RecordingListener, int], caplog: pytest.LogCaptureFixture
) -> None:
    """It passes on every byte, but both ends see another certificate than the other one."""
    channel, listener, port = remote
    relay = socket.create_server((LOOPBACK_ADDRESS, 0))

    def pass_on() -> None:
        plain, _ = relay.accept()
        upstream = client_context().wrap_socket(socket.create_connection((LOOPBACK_ADDRESS, port)))
        with (
            make_certificate().context.wrap_socket(plain, server_side=True) as downstream,
            upstream,
        ):
            downstream.sendall(upstream.recv(NONCE_BYTES))
            shown = b""
            while len(shown) < PROOF_BYTES + NONCE_BYTES:
                shown += downstream.recv(PROOF_BYTES + NONCE_BYTES)
            upstream.sendall(shown)
            downstream.sendall(upstream.recv(PROOF_BYTES) or bytes(PROOF_BYTES))

    thread = threading.Thread(target=pass_on)
    thread.start()
    with pytest.raises(SlotsError, match="the driver does not know this run's secret"):
        RankConnection(driver_address([LOOPBACK_ADDRESS], relay.getsockname()[1]), channel.secret,
                       hello(0))  # fmt: skip
    thread.join()
    relay.close()
    assert "the rank does not know this run's secret" in caplog.text
    assert listener.events.empty()


def test_a_rank_tries_all_addresses_of_the_driver(
    remote: tuple[Channel, RecordingListener, int],
) -> None:
    """The driver cannot know which of its networks a rank is on."""
    channel, listener, port = remote
    with socket.create_server((LOOPBACK_ADDRESS, 0)) as unused:
        closed = unused.getsockname()[1]
    address = f"tls://{LOOPBACK_ADDRESS}:{closed},{LOOPBACK_ADDRESS}:{port}"
    rank = RankConnection(address, channel.secret, hello(1))
    assert listener.next() == ("joined", 1)
    rank.close()
    with pytest.raises(SlotsError, match=f"cannot join the driver at .*{closed}: "):
        RankConnection(driver_address([LOOPBACK_ADDRESS], closed), channel.secret, hello(1))


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="needs Linux")
def test_a_silent_machine_is_noticed_by_the_kernels_of_both_ends(
    remote: tuple[Channel, RecordingListener, int],
) -> None:
    """Not by messages: a rank that is alive may hold the interpreter lock."""
    channel, listener, _ = remote
    rank = RankConnection(channel.remote_address or "", channel.secret, hello(0))
    assert listener.next() == ("joined", 0)
    ends = [rank._socket._socket, channel._writers[0].get_extra_info("socket")]  # type: ignore[union-attr]
    for end in ends:
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
    rank.close()
