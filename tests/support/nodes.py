"""Nodes on this machine: agents that join a driver, each a process as on a separate machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from trial_core.messages import Message, encode
from trial_core.processes.nodes.hub import Hub
from trial_core.processes.nodes.join_token import new_token
from trial_core.processes.nodes.node_messages import (
    AgentHello,
    Alive,
    Leave,
    NodeReady,
    ToAgent,
    Welcome,
    decode_to_agent,
    own_versions,
)
from trial_core.processes.nodes.node_provider import AGENT_MODULE
from trial_core.processes.slots.addresses import ListenAddress, parse_driver_address
from trial_core.processes.slots.connection import connect
from trial_core.processes.slots.framing import HEADER, frame, frame_length

LOOPBACK = "127.0.0.1"
DEADLINE_SECONDS = 60.0


@contextmanager
def hub(
    slots_per_node: int | None = None, token: str | None = None, network: str | None = None
) -> Iterator[Hub]:
    """A hub on the loopback interface."""
    opened = Hub(
        ListenAddress(LOOPBACK),
        token or new_token(),
        slots_per_node=slots_per_node,
        network=network,
    )
    with opened:
        yield opened


class FakeAgent:
    """An agent that starts no ranks: it joins, and says what it is told to. Lives in a thread.

    Args:
        hello: fields of its `AgentHello`.

    Attributes:
        heard: what the driver has said, but for signs of life.
    """

    def __init__(self, address: str, token: str, *, beats: bool = True, **hello: Any) -> None:
        self.heard: queue.Queue[ToAgent] = queue.Queue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        ((host, port),) = parse_driver_address(address)
        self._reader, self._writer = self._run(connect(host, port, token.encode()))
        fields = {
            "node": "", "host": "here", "pid": os.getpid(), "slots": None,
            "versions": own_versions(), **hello,
        }  # fmt: skip
        self.say(AgentHello(**fields))
        self._listening = asyncio.run_coroutine_threadsafe(self._listen(beats), self._loop)

    def say(self, message: Message) -> None:
        """Send a message to the driver."""
        self.say_bytes(frame(encode(message)))

    def say_bytes(self, data: bytes) -> None:
        """Send bytes to the driver, which need not be a message."""
        self._loop.call_soon_threadsafe(self._writer.write, data)

    def next(self) -> ToAgent:
        """The next message of the driver."""
        return self.heard.get(timeout=DEADLINE_SECONDS)

    def close(self) -> None:
        """Disconnect. A second call does nothing."""
        if self._loop.is_closed():
            return
        self._listening.cancel()
        self._run(self._disconnect())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE_SECONDS)

    async def _disconnect(self) -> None:
        self._writer.close()

    async def _listen(self, beats: bool) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                length = frame_length(await self._reader.readexactly(HEADER.size))
                message = decode_to_agent(await self._reader.readexactly(length))
                if not isinstance(message, Alive):
                    self.heard.put(message)
                elif beats:
                    self.say(Alive())
                if isinstance(message, Leave):
                    self._writer.close()
                    return

    def be_busy(self, seconds: float) -> None:
        """Neither take nor send anything for some time."""
        self._loop.call_soon_threadsafe(time.sleep, seconds)


@contextmanager
def fake_agent(hub: Hub, token: str, slots: int = 1, **hello: Any) -> Iterator[FakeAgent]:
    """An agent that has joined and is ready."""
    agent = FakeAgent(hub.address, token, **hello)
    try:
        assert isinstance(agent.next(), Welcome)
        agent.say(NodeReady(slots=slots, address=LOOPBACK))
        yield agent
    finally:
        agent.close()


class Agents:
    """Processes of agents, each with its own folder. A context manager that ends them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *error: object) -> None:
        for agent in self.started:
            agent.kill()
            agent.wait()

    def start(
        self,
        address: str,
        token: str,
        *arguments: str,
        program: tuple[str, str] = ("-m", AGENT_MODULE),
    ) -> subprocess.Popen[bytes]:
        """Start an agent that joins the driver at an address.

        Args:
            program: what Python executes.
        """
        number = len(self.started)
        home = self._folder / f"home-{number}"
        home.mkdir(parents=True)
        with (home / "agent.log").open("wb") as log:
            agent = subprocess.Popen(
                [sys.executable, *program, "--driver", address, *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TRIALFLOW_HOME": str(home), "DS_ACCELERATOR": "cpu"},
                cwd=home,
            )
        assert agent.stdin is not None
        agent.stdin.write(token.encode())
        agent.stdin.close()
        self.started.append(agent)
        return agent

    def log(self, number: int) -> str:
        """What an agent has written."""
        return (self._folder / f"home-{number}" / "agent.log").read_text()

    def home(self, number: int) -> Path:
        """An agent's home folder."""
        return self._folder / f"home-{number}"


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    """Starts agents, which end with the test."""
    with Agents(tmp_path / "agents") as started:
        yield started
