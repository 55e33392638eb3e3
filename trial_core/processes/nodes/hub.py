"""The driver's end of the connections to its nodes: one per agent, with TLS.

Both ends prove that they know the run's token, and that they see the same certificate, before
anything else is said (`trial_core/processes/slots/framing.py`). A stranger who cannot is logged and
disconnected. An agent is lost if it says nothing for `SILENCE_SECONDS`, or if its connection ends.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from trial_core.messages import Message, encode
from trial_core.processes.nodes.node_messages import (
    ALIVE_SECONDS,
    SILENCE_SECONDS,
    AgentHello,
    Alive,
    Draining,
    FromAgent,
    Leave,
    NodeReady,
    Refused,
    Welcome,
    decode_agent_hello,
    decode_from_agent,
    own_versions,
)
from trial_core.processes.slots.acceptor import Acceptor
from trial_core.processes.slots.addresses import ListenAddress
from trial_core.processes.slots.framing import ProtocolError, frame, read_frame
from trial_core.processes.slots.tls import make_certificate

logger = logging.getLogger(__name__)

HELLO_MAX_BYTES = 16384
LEAVE_SECONDS = 5.0
"""How long agents may take to disconnect after they were told that the run has ended."""


class ConnectedAgent:
    """An agent that has joined, as the driver sees it.

    Attributes:
        name: its node's; no other node has it.
        lost: why it is lost; None if it lives.
        draining: why its node will be taken away; None if it stays.
        on_message: gets its messages, in the hub's thread; set for each launch.
        on_lost: called with the reason when it is lost, in the hub's thread; likewise.
        code_digest: the digest of its newest code.
        given_up: why it counts as lost, whatever its connection shows; None if it does not.
        heard_at: the time of its last message, by the clock of the hub's loop.
    """

    def __init__(
        self,
        name: str,
        hello: AgentHello,
        send: Callable[[bytes], None],
        disconnect: Callable[[], None],
    ) -> None:
        self.name = name
        self.host = hello.host
        self.versions = hello.versions
        self.pid = hello.pid
        self.address = ""
        self.slots = 0
        self.lost: str | None = None
        self.draining: str | None = None
        self.on_message: Callable[[FromAgent], None] = lambda message: None
        self.on_lost: Callable[[str], None] = lambda why: None
        self.code_digest: str | None = None
        self.heard_at = 0.0
        self._send = send
        self._disconnect = disconnect
        self.given_up: str | None = None

    def heard(self) -> None:
        self.heard_at = asyncio.get_running_loop().time()

    def send(self, message: Message) -> None:
        """Send a message, unless the agent is lost. For any thread."""
        if self.lost is None:
            self._send(frame(encode(message)))

    def give_up(self, why: str) -> None:
        """Treat the agent as lost, for a reason that its connection does not show.

        If it lives, it ends its ranks. For any thread.
        """
        if self.lost is None:
            self.given_up = why
            self._disconnect()


class Hub(AbstractContextManager["Hub"]):
    """Listens for agents. A context manager: at its end, all agents end.

    Args:
        slots_per_node, environment, network: as in `Welcome`.
        same_versions: True if all nodes must have the versions of the first one; else they need
            only the driver's trialflow.

    Attributes:
        changed: notified when an agent is ready, refused, draining or lost.
        agents: the ready agents, lost ones included, by their nodes' names. Each new one brings a
            new dictionary, so other threads may iterate over it.
    """

    def __init__(
        self,
        listen: ListenAddress,
        token: str,
        *,
        slots_per_node: int | None = None,
        environment: Mapping[str, str] | None = None,
        network: str | None = None,
        same_versions: bool = True,
    ) -> None:
        self.changed = threading.Condition()
        self.agents: dict[str, ConnectedAgent] = {}
        self._rejected: list[tuple[str, str]] = []
        self._connected: dict[ConnectedAgent, asyncio.Task[Any] | None] = {}
        self._slots_per_node = slots_per_node
        self._environment = dict(environment or {})
        self._network = network
        self._same_versions = same_versions
        # The first node's versions are the measure; this machine may have another PyTorch.
        self._versions = {"trialflow": own_versions()["trialflow"]}
        self._names: set[str] = set()
        self._is_closing = False
        tls = make_certificate()
        listening, self.address = listen.open()
        self._acceptor = Acceptor(
            "trialflow-hub", token.encode(), "agent", HELLO_MAX_BYTES,
            lambda data, _: decode_agent_hello(data), self._talk,
        )  # fmt: skip
        self._acceptor.listen(listening, tls)

    def __exit__(self, *error: object) -> None:
        self.close()

    def take_rejected(self) -> list[tuple[str, str]]:
        """The nodes that were refused since the last call: their names, and why."""
        with self.changed:
            taken, self._rejected = self._rejected, []
        return taken

    def close(self) -> None:
        """Tell the agents that the run has ended, and disconnect them."""
        if self._is_closing:
            return
        self._is_closing = True
        asyncio.run_coroutine_threadsafe(self._let_leave(), self._acceptor.loop).result()
        self._acceptor.close()

    # ------------------------------------------------------------------ the loop's thread

    async def _let_leave(self) -> None:
        for agent in self._connected:  # also agents that still get ready
            agent.send(Leave())
        # They disconnect first. If this end did, data that they still send would reset the
        # connection, and with it the word that the run has ended.
        if talking := [task for task in self._connected.values() if task is not None]:
            await asyncio.wait(talking, timeout=LEAVE_SECONDS)

    async def _talk(
        self, hello: AgentHello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if why := self._refusal(hello):
            self._reject(hello.node or hello.host, why)
            writer.write(frame(encode(Refused(why=why))))
            return
        if self._is_closing:
            return
        agent = ConnectedAgent(
            self._name(hello), hello,
            lambda data: self._acceptor.call(writer.write, data),
            lambda: self._acceptor.call(writer.transport.abort),
        )  # fmt: skip
        agent.heard()
        agent.send(
            Welcome(
                node=agent.name,
                slots_per_node=hello.slots or self._slots_per_node,
                environment=self._environment,
                network=self._network,
            )
        )
        beating = asyncio.ensure_future(self._beat(agent, writer))
        self._connected[agent] = asyncio.current_task()
        try:
            why = await self._listen_to(agent, reader, writer)
        finally:
            beating.cancel()
            self._connected.pop(agent, None)
        if (seconds := self._acceptor.loop.time() - agent.heard_at) >= SILENCE_SECONDS:
            last = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
            why = f"no sign of life for {SILENCE_SECONDS:g} s, the last at {last}"
        agent.lost = agent.given_up or why
        if not self._is_closing:
            agent.on_lost(agent.lost)
        with self.changed:
            self.changed.notify_all()

    def _refusal(self, hello: AgentHello) -> str | None:
        for living in self._connected:  # also one that still gets ready
            if living.name == hello.node and living.lost is None:
                return f"the agent of a node {hello.node} has joined already (process {living.pid})"
        return self._other_versions(hello.versions)

    def _other_versions(self, versions: Mapping[str, str]) -> str | None:
        different = [
            f"{name} {versions.get(name, 'none')} instead of {version}"
            for name, version in self._versions.items()
            if versions.get(name) != version
        ]
        if not different:
            return None
        return (
            f"it has {', '.join(different)}; install the same versions on the driver's machine "
            "and on all nodes"
        )

    def _name(self, hello: AgentHello) -> str:
        wanted = name = hello.node or hello.host
        number = 1
        while name in self._names and not hello.node:
            number += 1
            name = f"{wanted}-{number}"
        self._names.add(name)
        return name

    async def _listen_to(
        self, agent: ConnectedAgent, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> str:
        """Handle an agent's messages. Returns why it is lost."""
        while True:
            try:
                message = decode_from_agent(await read_frame(reader, agent.heard))
            except (OSError, EOFError) as error:
                return f"its agent has closed the connection ({type(error).__name__})"
            except (ProtocolError, msgspec.MsgspecError) as error:
                return f"its agent has sent an invalid message: {error}"
            if isinstance(message, NodeReady):
                why = self._other_versions(agent.versions)  # of one that was ready sooner
                if message.problem is not None:
                    why = f"it cannot train: {message.problem}"
                if why is not None:
                    self._names.discard(agent.name)
                    self._reject(agent.name, why)
                    writer.write(frame(encode(Refused(why=why))))
                    return f"it is refused: {why}"
                self.admit(agent, message)
            elif isinstance(message, Draining):
                with self.changed:
                    agent.draining = message.why
                    self.changed.notify_all()
            elif not isinstance(message, Alive):
                try:
                    agent.on_message(message)
                except Exception:
                    # A callback of the driver, such as a display, has failed. Training continues.
                    logger.exception("a message of node %s could not be handled", agent.name)

    def admit(self, agent: ConnectedAgent, ready: NodeReady) -> None:
        """Count an agent among the hub's; who iterates over them now sees it the next time."""
        agent.slots, agent.address = ready.slots, ready.address
        if self._same_versions:
            self._versions = agent.versions
        with self.changed:
            self.agents = {**self.agents, agent.name: agent}
            self.changed.notify_all()

    def _reject(self, node: str, why: str) -> None:
        with self.changed:
            self._rejected.append((node, why))
            self.changed.notify_all()

    async def _beat(self, agent: ConnectedAgent, writer: asyncio.StreamWriter) -> None:
        """Send signs of life, and disconnect the agent if it sends none."""
        while self._acceptor.loop.time() - agent.heard_at < SILENCE_SECONDS:
            agent.send(Alive())
            await asyncio.sleep(ALIVE_SECONDS)
        writer.transport.abort()
