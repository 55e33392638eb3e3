"""Who may join a run, and when a node is lost. Agents that start no ranks; real TLS."""

from __future__ import annotations

import asyncio
import io
import logging
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.support.nodes import DEADLINE_SECONDS, LOOPBACK, FakeAgent, fake_agent, hub
from tests.support.waiting import until
from trial_core.errors import LaunchError
from trial_core.messages import encode
from trial_core.processes.nodes import hub as hub_module
from trial_core.processes.nodes.agent import Agent
from trial_core.processes.nodes.hub import Hub
from trial_core.processes.nodes.join_token import new_token, read_token, token_of_file, write_token
from trial_core.processes.nodes.node_messages import (
    AgentHello,
    Alive,
    Leave,
    NodeReady,
    Refused,
    Welcome,
    own_versions,
)
from trial_core.processes.slots import acceptor
from trial_core.processes.slots.addresses import (
    ListenAddress,
    driver_address,
    own_addresses,
    parse_driver_address,
)
from trial_core.processes.slots.connection import connect
from trial_core.processes.slots.fork_server import ForkServer
from trial_core.processes.slots.framing import (
    HEADER,
    NONCE_BYTES,
    PROOF_BYTES,
    ProtocolError,
    frame,
    proof,
)
from trial_core.processes.slots.tls import client_context, digest_of, make_certificate

TOKEN = new_token()


@pytest.fixture
def driver() -> Iterator[Hub]:
    """A hub that nodes may join with `TOKEN`."""
    with hub(slots_per_node=3, token=TOKEN) as opened:
        yield opened


def wait_for(hub: Hub, is_so: Callable[[], bool]) -> None:
    """Wait until the hub has changed so that something is so."""
    with hub.changed:
        assert hub.changed.wait_for(is_so, DEADLINE_SECONDS)


def port_of(hub: Hub) -> int:
    ((_, port),) = parse_driver_address(hub.address)
    return port


def said_by_stranger(port: int, said: bytes, secured: bool) -> bytes:
    """What the driver answers to a stranger until it closes the connection."""
    with socket.create_connection((LOOPBACK, port), DEADLINE_SECONDS) as plain:
        connection = client_context().wrap_socket(plain) if secured else plain
        answer = connection.recv(NONCE_BYTES) if secured else b""
        connection.sendall(said)
        while data := connection.recv(4096):
            answer += data
        return answer


def test_an_agent_joins_and_is_lost_when_it_disconnects(driver: Hub) -> None:
    """It gets a name that no other node has, and is told how many slots it shall offer."""
    with fake_agent(driver, TOKEN, slots=2), fake_agent(driver, TOKEN):
        wait_for(driver, lambda: len(driver.agents) == 2)
        assert set(driver.agents) == {"here", "here-2"}
        assert (driver.agents["here"].slots, driver.agents["here"].lost) == (2, None)
    wait_for(driver, lambda: all(agent.lost for agent in driver.agents.values()))
    lost = driver.agents["here"].lost
    assert (lost or "").startswith("its agent has closed the connection")


def test_an_agent_is_told_what_the_run_needs() -> None:
    """Unless it was started for a number of slots."""
    with hub(slots_per_node=3, token=TOKEN, network="lo") as driver:
        for slots, told in ((None, 3), (5, 5)):
            agent = FakeAgent(driver.address, TOKEN, slots=slots)
            welcome = agent.next()
            agent.close()
            assert isinstance(welcome, Welcome)
            assert (welcome.slots_per_node, welcome.network) == (told, "lo")


@pytest.mark.parametrize("secured", [False, True], ids=["no-tls", "tls"])
@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" * 99], ids=["http", "hello"]
)
def test_a_stranger_is_refused_and_logged(
    driver: Hub,
    said: bytes,
    secured: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And hears nothing but a nonce. The run continues: an agent still gets its messages."""
    monkeypatch.setattr(acceptor, "HANDSHAKE_SECONDS", 1.0)
    with fake_agent(driver, TOKEN) as agent:
        wait_for(driver, lambda: len(driver.agents) == 1)
        said = said.ljust(PROOF_BYTES + NONCE_BYTES)
        answer = said_by_stranger(port_of(driver), said, secured)
        assert len(answer) == NONCE_BYTES if secured else answer[:1] != b"\x16"
        assert driver.agents["here"].lost is None
        driver.agents["here"].send(Leave())
        assert agent.next() == Leave()
    assert f"rejected a connection from ('{LOOPBACK}'" in caplog.text
    assert "does not know this run's secret" in caplog.text or not secured


def test_a_hello_that_is_no_text_ends_its_connection_alone(driver: Hub) -> None:
    """As any other message that does not match its type."""

    async def answer() -> bytes:
        reader, writer = await connect(LOOPBACK, port_of(driver), TOKEN.encode())
        hello = AgentHello(node="", host="here", pid=1, slots=None, versions={})
        writer.write(frame(encode(hello).replace(b"\xa4here", b"\xa4\xff\xfe\xfd\xfc")))
        answer = await asyncio.wait_for(reader.read(1), DEADLINE_SECONDS)
        writer.close()
        return answer

    assert asyncio.run(answer()) == b""
    until(lambda: driver._acceptor._unproven == 0, "it is no longer counted")


def test_a_proof_cannot_be_replayed(driver: Hub, caplog: pytest.LogCaptureFixture) -> None:
    """Each connection has another nonce."""
    port, proofs = port_of(driver), []
    for _ in range(2):
        with socket.create_connection((LOOPBACK, port)) as plain:
            connection = client_context().wrap_socket(plain)
            nonce = connection.recv(NONCE_BYTES)
            certificate = digest_of(connection.getpeercert(binary_form=True) or b"")
            proofs.append(proof(TOKEN.encode(), "agent", nonce, certificate) + bytes(NONCE_BYTES))
            connection.sendall(proofs[0])
            answer = connection.recv(PROOF_BYTES)
            assert len(answer) == (PROOF_BYTES if len(proofs) == 1 else 0)
    assert "the agent does not know this run's secret" in caplog.text


def test_a_relay_between_agent_and_driver_is_refused_by_both(
    driver: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    """It passes on every byte, but both ends see another certificate than the other one."""
    context, _ = make_certificate()
    relay = socket.create_server((LOOPBACK, 0))

    def pass_on() -> None:
        plain, _ = relay.accept()
        upstream = client_context().wrap_socket(
            socket.create_connection((LOOPBACK, port_of(driver)))
        )
        with context.wrap_socket(plain, server_side=True) as downstream, upstream:
            downstream.sendall(upstream.recv(NONCE_BYTES))
            upstream.sendall(downstream.recv(PROOF_BYTES + NONCE_BYTES))
            downstream.sendall(upstream.recv(PROOF_BYTES) or bytes(PROOF_BYTES))

    thread = threading.Thread(target=pass_on)
    thread.start()
    with pytest.raises(ProtocolError, match="the driver does not know this run's secret"):
        asyncio.run(connect(LOOPBACK, relay.getsockname()[1], TOKEN.encode()))
    thread.join()
    relay.close()
    assert "the agent does not know this run's secret" in caplog.text
    assert driver.agents == {}


def test_a_silent_node_is_lost(driver: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a cut cable: the connection stays open."""
    monkeypatch.setattr(hub_module, "SILENCE_SECONDS", 0.3)
    monkeypatch.setattr(hub_module, "ALIVE_SECONDS", 0.05)
    lost: list[str] = []
    with (
        fake_agent(driver, TOKEN, host="speaks") as speaks,
        fake_agent(driver, TOKEN, host="silent", beats=False),
    ):
        wait_for(driver, lambda: "silent" in driver.agents)
        driver.agents["silent"].on_lost = lost.append
        wait_for(driver, lambda: driver.agents["silent"].lost is not None)
        assert driver.agents["speaks"].lost is None
        speaks.say(NodeReady(slots=1, address=LOOPBACK))
    (why,) = lost
    assert why.startswith("no sign of life for 0.3 s, the last at ")


def test_a_large_message_on_a_slow_network_is_no_silence(
    driver: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part of it counts as a sign of life."""
    monkeypatch.setattr(hub_module, "SILENCE_SECONDS", 0.6)
    monkeypatch.setattr(hub_module, "ALIVE_SECONDS", 0.05)
    with fake_agent(driver, TOKEN, beats=False) as agent:
        wait_for(driver, lambda: "here" in driver.agents)
        agent.say_bytes(HEADER.pack(10**6))
        begun = time.monotonic()
        while time.monotonic() < begun + 1.5:
            agent.say_bytes(b"x")
            time.sleep(0.05)
        assert driver.agents["here"].lost is None
        wait_for(driver, lambda: driver.agents["here"].lost is not None)


def test_strangers_do_not_use_up_the_drivers_files(
    driver: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of those that have proved nothing, only so many are connected at once."""
    monkeypatch.setattr(acceptor, "MAX_UNPROVEN", 2)
    strangers = [socket.create_connection((LOOPBACK, port_of(driver))) for _ in range(3)]
    strangers[2].settimeout(DEADLINE_SECONDS)
    assert strangers[2].recv(1) == b""
    assert "too many connections at once" in caplog.text
    for stranger in strangers:
        stranger.close()
    until(lambda: driver._acceptor._unproven == 0, "the strangers are gone")
    with fake_agent(driver, TOKEN):
        wait_for(driver, lambda: len(driver.agents) == 1)


@pytest.mark.parametrize("package", ["python", "torch", "deepspeed", "trialflow"])
def test_nodes_with_other_versions_are_refused(driver: Hub, package: str) -> None:
    """The run fails before training, and says what differs."""
    with fake_agent(driver, TOKEN):
        wait_for(driver, lambda: len(driver.agents) == 1)
        other = {**own_versions(), package: "0.0.1"}
        late = FakeAgent(driver.address, TOKEN, host="other", versions=other)
        refused = late.next()
        late.close()
    assert isinstance(refused, Refused)
    assert f"it has {package} 0.0.1 instead of {own_versions()[package]}; install" in refused.why
    assert driver.take_rejected() == [("other", refused.why)]


def test_a_node_joins_once(driver: Hub) -> None:
    """A provider's node whose agent lives gets no second one, also before the first is ready."""
    first = FakeAgent(driver.address, TOKEN, node="gpu-7")
    assert isinstance(first.next(), Welcome)
    for is_ready in (False, True):
        if is_ready:
            first.say(NodeReady(slots=1, address=LOOPBACK))
            wait_for(driver, lambda: "gpu-7" in driver.agents)
        second = FakeAgent(driver.address, TOKEN, node="gpu-7")
        refused = second.next()
        second.close()
        assert isinstance(refused, Refused)
        assert "the agent of a node gpu-7 has joined already" in refused.why
    first.close()


def test_an_agent_that_cannot_train_is_refused(driver: Hub) -> None:
    """For example because its GPUs cannot be counted. Once they can, it may join."""
    agent = FakeAgent(driver.address, TOKEN)
    assert isinstance(agent.next(), Welcome)
    agent.say(NodeReady(problem="its GPUs cannot be counted"))
    why = "it cannot train: its GPUs cannot be counted"
    assert agent.next() == Refused(why=why)
    assert driver.take_rejected() == [("here", why)]
    agent.close()
    with fake_agent(driver, TOKEN):
        wait_for(driver, lambda: "here" in driver.agents)


def test_nodes_that_start_together_have_the_same_versions(driver: Hub) -> None:
    """Both have said hello before one is ready. The first one that is ready is the measure."""
    first, second = (
        FakeAgent(driver.address, TOKEN, host=host, versions={**own_versions(), "torch": torch})
        for host, torch in (("first", "2.13"), ("second", "2.12"))
    )
    for agent in (first, second):
        assert isinstance(agent.next(), Welcome)
    first.say(NodeReady(slots=1, address=LOOPBACK))
    wait_for(driver, lambda: "first" in driver.agents)
    second.say(NodeReady(slots=1, address=LOOPBACK))
    refused = second.next()
    assert isinstance(refused, Refused)
    assert refused.why.startswith("it has torch 2.12 instead of 2.13; install the same")
    assert list(driver.agents) == ["first"]
    for agent in (first, second):
        agent.close()


def test_the_end_of_a_run_is_told_to_agents_that_get_ready() -> None:
    """Not only to those that are ready: they end as at any end of a run."""
    with hub(token=TOKEN) as driver:
        agent = FakeAgent(driver.address, TOKEN)
        assert isinstance(agent.next(), Welcome)
    assert agent.next() == Leave()
    agent.close()


def test_an_agent_ends_when_its_driver_refuses_it_or_is_another_one(
    driver: Hub, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    """And says so, also while it still tries."""
    caplog.set_level(logging.INFO)
    folder = tmp_path_factory.mktemp("node")

    def join(token: str, seconds: float = 5.0) -> None:
        asyncio.run(Agent(folder, ForkServer(), "gpu-7").serve(driver.address, token, seconds))

    with pytest.raises(LaunchError, match=r"no driver answered within 0 s \(127.*the token is"):
        join(new_token(), 0)
    with pytest.raises(LaunchError, match=r"no driver answered within 0\.5 s"):
        join(new_token(), 0.5)
    assert caplog.text.count("waiting up to 0.5 s for the driver: 127") == 1
    with fake_agent(driver, TOKEN, node="gpu-7"):
        wait_for(driver, lambda: "gpu-7" in driver.agents)
        with pytest.raises(LaunchError, match="the driver refuses this node: the agent of"):
            join(TOKEN)


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPv4 and IPv6; the first free port of a range; an advertised name in place of the bound."""
    text = driver_address(["10.0.0.5", "fd00::5"], 7600)
    assert text == "tls://10.0.0.5:7600,[fd00::5]:7600"
    assert parse_driver_address(text) == [("10.0.0.5", 7600), ("fd00::5", 7600)]
    for wrong in ("10.0.0.5:7600", "tls://10.0.0.5", "tls://a:b", "tls://:1", "http://a:1", ""):
        with pytest.raises(LaunchError, match="expected tls://HOST:PORT"):
            parse_driver_address(wrong)
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with Hub(ListenAddress(LOOPBACK, (port, port + 20), "login.example"), TOKEN) as driver:
            ((host, found),) = parse_driver_address(driver.address)
        assert host == "login.example"
        assert port < found <= port + 20
        with pytest.raises(LaunchError, match=f"on {LOOPBACK}, port {port}: .*resources.channel"):
            Hub(ListenAddress(LOOPBACK, (port, port)), TOKEN)
    assert LOOPBACK not in ListenAddress("0.0.0.0").hosts or len(own_addresses()) == 1
    assert ListenAddress("0.0.0.0").hosts == ListenAddress().hosts == own_addresses()
    with Hub(ListenAddress("::1"), TOKEN) as driver, fake_agent(driver, TOKEN):
        wait_for(driver, lambda: len(driver.agents) == 1)


def test_the_connection_is_at_least_tls_1_3(driver: Hub) -> None:
    """Older versions are refused."""
    context = client_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_connection((LOOPBACK, port_of(driver))) as plain,
        pytest.raises(ssl.SSLError, match=r"(?i)protocol"),
    ):
        context.wrap_socket(plain)


def test_tokens(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only their owner can read the file; a short token is refused. Any bytes may be one."""
    path = tmp_path_factory.mktemp("token") / "token"
    token = write_token(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert token_of_file(path) == token != write_token(path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"short\n")))
    with pytest.raises(LaunchError, match="standard input has 5 characters, and a token at least"):
        read_token(None)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff" * 32)))
    assert len(read_token(None)) == 32
    with pytest.raises(LaunchError, match="cannot be read: No such file"):
        token_of_file(path.with_name("none"))


def test_only_so_many_strangers_are_logged(
    driver: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A port scan does not fill the log."""
    monkeypatch.setattr(acceptor, "LOGGED_STRANGERS", 2)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            said_by_stranger(port_of(driver), b"x" * 99, secured=False)
    refusals = [each.getMessage() for each in caplog.records if "rejected" in each.getMessage()]
    assert len(refusals) == 2
    assert refusals[1].endswith("; later ones are not logged")


def test_an_agent_that_still_talks_hears_the_end(
    driver: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy one, which talks before it listens: a closed connection would be reset by that."""
    monkeypatch.setattr(acceptor, "HANDSHAKE_SECONDS", 5.0)
    with fake_agent(driver, TOKEN) as agent:
        wait_for(driver, lambda: len(driver.agents) == 1)
        agent.be_busy(0.5)
        for _ in range(2):
            agent.say(Alive())
            agent.be_busy(0.05)
        driver.close()
        assert agent.next() == Leave()
