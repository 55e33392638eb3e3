"""A small cluster of each provider on this machine, for tests that every provider passes."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest

from tests.support.nodes import LOOPBACK, Agents, hub
from tests.support.processes import kill
from tests.support.ray import RayCluster
from tests.support.slurm import Slurm
from tests.support.waiting import until
from trial_core.processes.nodes import ray_provider
from trial_core.processes.nodes.hub import ConnectedAgent
from trial_core.processes.nodes.join_token import new_token
from trial_core.processes.nodes.node_pool import NodePool
from trial_core.processes.nodes.node_provider import (
    Gang,
    JoinProvider,
    NodeProvider,
    NodeRequest,
)
from trial_core.processes.nodes.ray_connection import import_ray
from trial_core.processes.nodes.ray_provider import RayProvider
from trial_core.processes.nodes.slurm_provider import SlurmProvider

SECONDS = 120.0
ROOT = Path(__file__).parents[2]
DRIVER = ROOT / "tests" / "support" / "scripts" / "provider_driver.py"
STAND_IN = ("-m", "tests.support.stand_in_agent")
"""What starts in place of an agent where no driver is needed."""
NO_PRELOAD = ("--preload", "none")

RAY = pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.long])
SLURM = pytest.param("slurm", marks=pytest.mark.xdist_group("slurm"))
JOIN = pytest.param("join", marks=pytest.mark.long)  # tests/flows/test_nodes.py has it by default


class NodeCluster(Protocol):
    """Two nodes for two ranks each. Tests may harm it.

    Attributes:
        refusal: what the error for 64 slots says.
        machines: the two nodes, unless agents are started by hand.
    """

    refusal: str
    machines: tuple[str, ...]

    def provider(self) -> NodeProvider:
        """The provider that finds its nodes."""

    def expect(self, driver: str, token: str) -> None:
        """A run is about to ask for its nodes; where no provider starts agents, start two."""

    def start_again(self) -> None:
        """Start an agent in place of one that has ended, where no provider does."""

    def variables(self) -> dict[str, str]:
        """With which a process uses the provider."""

    def resources(self) -> dict[str, Any]:
        """With which an experiment does."""

    def machine(self, agent: ConnectedAgent) -> str:
        """The node on which an agent runs."""

    def add(self) -> None:
        """Make one more node available."""

    def drain(self, machine: str) -> None:
        """Ask for the end of a node, as its administrator does."""

    def lose(self, machine: str) -> None:
        """Take a node away."""

    def reservations(self) -> list[str]:
        """What the cluster keeps for runs."""


class OfRay:
    """Each node is a raylet."""

    refusal = "can never place 32 nodes with 2 CPU: "

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster = cluster
        _, *machines = cluster.raylets  # the head has no cores
        self.machines = tuple(machines)
        self._harmed: list[str] = []

    def provider(self) -> NodeProvider:
        return RayProvider(self._cluster.address)

    def expect(self, driver: str, token: str) -> None:
        pass

    def start_again(self) -> None:
        pass

    def variables(self) -> dict[str, str]:
        return dict(self._cluster.environment)

    def resources(self) -> dict[str, Any]:
        return {"engine": "ray", "ray": {"address": self._cluster.address}}

    def machine(self, agent: ConnectedAgent) -> str:
        parents = {parent.pid for parent in psutil.Process(agent.pid).parents()}
        return next(node for node, raylet in self._cluster.raylets.items() if raylet in parents)

    def add(self) -> None:
        self._harmed.append(self._cluster.add(2))

    def drain(self, machine: str) -> None:
        self._harmed.append(machine)
        self._cluster.drain(machine)

    def lose(self, machine: str) -> None:
        self._harmed.append(machine)
        self._cluster.kill(machine)

    def reservations(self) -> list[str]:
        return placement_groups()

    def restore(self) -> None:
        """Replace the nodes that a test has drained, killed or added."""
        ray = import_ray()
        for node in self._harmed:
            self._cluster.end(node)

        def living() -> set[str]:
            return {node["NodeID"] for node in ray.nodes() if node["Alive"]}

        until(lambda: not living() & set(self._harmed), "Ray knows which nodes are gone")
        while len(self._cluster.raylets) < 3:  # with the head
            self._cluster.add(2)


class OfSlurm:
    """Each node is a slurmd. The allocation has a third one, which is drained at first."""

    refusal = r"64 slots.*have 4 \(node1: 2, node2: 2, node3: ALLOCATED\+DRAIN\)"

    machines = ("node1", "node2")

    def __init__(self, slurm: Slurm, environment: Mapping[str, str]) -> None:
        self._slurm = slurm
        self._environment = environment
        slurm.drain_node("node3")

    def provider(self) -> NodeProvider:
        return SlurmProvider(self._environment)

    def expect(self, driver: str, token: str) -> None:
        pass

    def start_again(self) -> None:
        pass

    def variables(self) -> dict[str, str]:
        return {name: self._environment[name] for name in ("SLURM_CONF", "SLURM_JOB_ID")}

    def resources(self) -> dict[str, Any]:
        return {"engine": "auto"}

    def machine(self, agent: ConnectedAgent) -> str:
        return agent.name.partition("#")[0]

    def add(self) -> None:
        self._slurm.command("scontrol", "update", "nodename=node3", "state=resume")

    def drain(self, machine: str) -> None:
        self._slurm.drain_node(machine)

    def lose(self, machine: str) -> None:
        name = f"nodename={machine}"
        self._slurm.command("scontrol", "update", name, "state=down", "reason=test")

    def reservations(self) -> list[str]:
        return self._slurm.steps(self._environment)


class OfJoin:
    """Each node is an agent with a folder."""

    refusal = "of 64 slots there"
    machines = ()

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._driver = ("", "")

    def provider(self) -> NodeProvider:
        return JoinProvider()

    def expect(self, driver: str, token: str) -> None:
        self._driver = (driver, token)
        self.add()
        self.add()

    def start_again(self) -> None:
        self.add()

    def variables(self) -> dict[str, str]:
        return {}

    def resources(self) -> dict[str, Any]:
        return {"engine": "join"}

    def machine(self, agent: ConnectedAgent) -> str:
        return str(agent.pid)

    def add(self) -> None:
        self._agents.start(*self._driver, *NO_PRELOAD)

    def drain(self, machine: str) -> None:
        kill([int(machine)], signal.SIGTERM)

    def lose(self, machine: str) -> None:
        kill([int(machine)])

    def reservations(self) -> list[str]:
        return []


def placement_groups() -> list[str]:
    """The states of Ray's placement groups that there still are."""
    table = import_ray().util.placement_group_table()
    return [each["state"] for each in table.values() if each["state"] != "REMOVED"]


@pytest.fixture
def admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares the time of asking the cluster whether it needs a token; other tests do that."""
    monkeypatch.setattr(ray_provider, "check_admission", lambda *_: None)


@pytest.fixture
def connected(ray_cluster: RayCluster) -> Iterator[None]:
    """This process is connected already, as a flow that uses Ray itself."""
    ray = import_ray()
    on_sigterm = signal.getsignal(signal.SIGTERM)  # `ray.init` sets another handler
    ray.init(ray_cluster.address, log_to_driver=False)
    yield
    ray.shutdown()
    signal.signal(signal.SIGTERM, on_sigterm)


@pytest.fixture
def of_ray(admitted: None, connected: None, ray_cluster: RayCluster) -> Iterator[OfRay]:
    """A cluster of Ray, whole again after the test."""
    cluster = OfRay(ray_cluster)
    yield cluster
    cluster.restore()


@pytest.fixture
def of_slurm(slurm: Slurm, tmp_path: Path) -> Iterator[OfSlurm]:
    """An allocation of Slurm."""
    with slurm.allocation("--nodes=3", "--exclusive") as environment:
        yield OfSlurm(slurm, {**environment, "TRIALFLOW_HOME": str(tmp_path / "home")})


@pytest.fixture
def of_join(tmp_path: Path) -> Iterator[OfJoin]:
    """Agents that tests start."""
    with Agents(tmp_path) as agents:
        yield OfJoin(agents)


def made_cluster(request: pytest.FixtureRequest) -> Iterator[NodeCluster]:
    """A cluster of the provider that a fixture's parameter names; for fixtures."""
    made: NodeCluster = request.getfixturevalue(f"of_{request.param}")
    yield made
    until(lambda: not made.reservations(), "nothing is reserved", SECONDS, made.reservations)


@pytest.fixture(params=[RAY, SLURM, JOIN])
def cluster(request: pytest.FixtureRequest) -> Iterator[NodeCluster]:
    """A cluster of each provider. In the end it keeps nothing for the runs of the test."""
    yield from made_cluster(request)


@pytest.fixture(params=[RAY, SLURM])
def starting_cluster(request: pytest.FixtureRequest) -> Iterator[NodeCluster]:
    """As `cluster`, but only of the providers that start agents."""
    yield from made_cluster(request)


def placed(cluster: NodeCluster, request: NodeRequest) -> Gang:
    """The nodes of a run whose agents are stand-ins."""
    return cluster.provider().acquire(request, SECONDS, lambda: False)


def told(path: Path, gang: Gang | None = None) -> dict[str, Any]:
    """What a stand-in has written; waits for it. If none is started, the failure says why."""
    until(path.exists, f"{path.name} is written", SECONDS, lambda: gang and gang.events())
    read: dict[str, Any] = json.loads(path.read_text())
    return read


@contextmanager
def nodes_of_a_run(
    cluster: NodeCluster,
    slots: int,
    min_slots: int | None = None,
    slots_per_node: int | None = None,
    seconds: float = SECONDS,
    replace_seconds: float = 0.0,
) -> Iterator[NodePool]:
    """The nodes of a run, with agents. In the end none of its processes is left."""
    token = new_token()
    with hub(slots_per_node, token) as driver:
        request = NodeRequest(slots, min_slots or slots, slots_per_node, on_cpu=True)
        cluster.expect(driver.address, token)
        with NodePool(
            cluster.provider(), driver, request, token, seconds, replace_seconds, NO_PRELOAD
        ) as pool:
            yield pool
        until(
            lambda: not processes_of(driver.address), "no agent is left", SECONDS,
            lambda: processes_of(driver.address),
        )  # fmt: skip


def processes_of(driver: str) -> dict[int, str]:
    """Those whose command lines name a driver: its agents, and what starts them."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            found[process.pid] = " ".join(process.cmdline())
    return {pid: command for pid, command in found.items() if driver in command}


def driver_address(resources: Mapping[str, Any]) -> str:
    """The address of a driver whose experiment says at which port it listens."""
    return f"tls://{LOOPBACK}:{resources['channel']['ports']}"


def agents_of(resources: Mapping[str, Any]) -> list[int]:
    """The agents of such a driver."""
    return [*processes_of(driver_address(resources))]
