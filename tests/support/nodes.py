"""Nodes on this machine: agents that join a driver, each a process as on a machine of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trial_core.nodes.engine import AGENT_MODULE
from trial_core.nodes.hub import Hub, ListenAddress
from trial_core.nodes.join_token import new_token

LOOPBACK = "127.0.0.1"


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

    def start(self, address: str, token: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start an agent that joins the driver at an address."""
        number = len(self.started)
        home = self._folder / f"home-{number}"
        home.mkdir(parents=True)
        with (home / "agent.log").open("wb") as log:
            agent = subprocess.Popen(
                [sys.executable, "-m", AGENT_MODULE, "--driver", address, *arguments],
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
