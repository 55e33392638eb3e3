"""Measures the driver with 1000 simulated ranks on 125 agents.

Hub, node pool, node launcher and slot group are the real ones. The simulated agents
(`benchmarks.scale_agents`) speak the real protocol, over TLS on the loopback interface, but start
no processes. Many of them share a process, and all share the machine's cores with the driver, so
the processor time of the driver is measured besides.

The agents join, the ranks of a slot group join, and `Ping` goes to all of them. Then the process of
one agent, which it has to itself, is killed during a request that takes long.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from benchmarks.figures import conclude, percentile
from benchmarks.ranks import ROOT, processor_seconds
from benchmarks.scale_agents import READY
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import RankFailed
from trial_core.messages import Done, Ping, TrainBatches
from trial_core.processes.nodes.hub import ConnectedAgent, Hub
from trial_core.processes.nodes.join_token import new_token
from trial_core.processes.nodes.node_launcher import NodeCode, launch_on_nodes
from trial_core.processes.nodes.node_pool import NodePool
from trial_core.processes.nodes.node_provider import JoinProvider, NodeRequest
from trial_core.processes.slots.addresses import LOOPBACK_ADDRESS, ListenAddress
from trial_core.processes.slots.slot_group import SlotGroup

TARGETS = {"join_seconds": 10.0, "request_ms_median": 100.0, "lost_node_named_ms": 30_000.0}
WARM_UP_REQUESTS = 5
PAUSE_SECONDS = 0.05
WAIT_SECONDS = 120.0


@dataclass(frozen=True)
class Scale:
    """The size of the simulation.

    Attributes:
        agents: the number of agents, at least two.
        slots: the number of ranks of each agent.
        processes: the agents are divided among so many, except for the one that is killed.
    """

    agents: int
    slots: int
    processes: int

    @property
    def ranks(self) -> int:
        """The number of ranks of all agents."""
        return self.agents * self.slots


class AgentProcess:
    """A process of simulated agents.

    Args:
        driver: the driver's address.
        nodes: the agents' names.
    """

    def __init__(self, driver: str, token: str, nodes: list[str], slots: int) -> None:
        self.nodes = nodes
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "benchmarks.scale_agents",
                "--driver", driver, "--slots", str(slots), "--nodes", *nodes,
            ],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._write(token)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Wait until the process has imported everything."""
        if self._process.stdout is None or self._process.stdout.readline().strip() != READY:
            raise RuntimeError(f"the process of {self.nodes[0]} has ended; see its error above")

    def join(self) -> None:
        """Have the agents join the driver."""
        self._write("join")

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self._process.kill()
        self._process.wait()

    def _write(self, line: str) -> None:
        if self._process.stdin is not None:
            print(line, file=self._process.stdin, flush=True)


@contextmanager
def agent_processes(scale: Scale, driver: str, token: str) -> Iterator[list[AgentProcess]]:
    """Start processes that are ready to join; the last has one agent. They end with the block."""
    names = [f"node-{number}" for number in range(scale.agents)]
    shares = [names[:-1][first :: scale.processes] for first in range(scale.processes)]
    with ExitStack() as stack:
        processes = []
        for nodes in (*filter(None, shares), names[-1:]):
            processes.append(AgentProcess(driver, token, nodes, scale.slots))
            stack.callback(processes[-1].kill)
        for process in processes:
            process.wait_until_ready()
        yield processes


def measure(scale: Scale, requests: int, folder: Path) -> dict[str, float]:
    """Return the figures of one run."""
    token = new_token()
    before_kib = resident_kib()
    with (
        Hub(ListenAddress(LOOPBACK_ADDRESS), token) as hub,
        agent_processes(scale, hub.address, token) as processes,
        NodePool(
            JoinProvider(), hub, NodeRequest(scale.ranks, scale.ranks), token, WAIT_SECONDS
        ) as pool,
    ):
        watch = Watch()
        for process in processes:
            process.join()
        agents = pool.gather()
        join_seconds, join_driver_seconds = watch.read()
        print(
            f"{scale.agents} agents have joined: {join_seconds:.2f} s, of which the driver's "
            f"processor time is {join_driver_seconds:.2f} s",
            flush=True,
        )
        watch = Watch()
        with launched(scale, agents, folder) as slots:
            start_seconds, start_driver_seconds = watch.read()
            figures = {
                "join_seconds": join_seconds,
                "join_driver_processor_seconds": join_driver_seconds,
                "ranks_joined_seconds": start_seconds,
                "ranks_joined_driver_processor_seconds": start_driver_seconds,
                **measure_requests(slots, processes, requests),
                "driver_kib_per_rank": (resident_kib() - before_kib) / scale.ranks,
                "lost_node_named_ms": measure_loss(slots, processes[-1]),
            }
            watch = Watch()
        return {**figures, "group_ended_ms": watch.read()[0] * 1e3}


class Watch:
    """Measures time, and this process's processor time, from its creation on."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._processor_began = time.process_time()

    def read(self) -> tuple[float, float]:
        """Return the seconds since the creation, and the processor seconds of all threads."""
        return time.perf_counter() - self._began, time.process_time() - self._processor_began


def launched(scale: Scale, agents: list[ConnectedAgent], folder: Path) -> SlotGroup:
    """Launch a slot group. Returns once all ranks have joined."""
    store = CheckpointStore(f"file://{folder}/checkpoints")
    launcher = partial(
        launch_on_nodes, agents, NodeCode(None, folder), store.spec, "claims/scale.json"
    )
    return SlotGroup(scale.ranks, working_dir=folder, log_dir=folder / "logs", launcher=launcher)


def measure_requests(
    slots: SlotGroup, processes: list[AgentProcess], requests: int
) -> dict[str, float]:
    """Return the time from sending a Ping to the last rank's answer, and its processor time."""
    pids = [process.pid for process in processes]
    for _ in range(WARM_UP_REQUESTS):
        slots.request(Ping(), Done)
    durations_ms, driver_ms = [], []
    agents_began = processor_seconds(pids)
    for _ in range(requests):
        time.sleep(PAUSE_SECONDS)
        watch = Watch()
        slots.request(Ping(), Done)
        seconds, driver_seconds = watch.read()
        durations_ms.append(seconds * 1e3)
        driver_ms.append(driver_seconds * 1e3)
    agents_ms = (processor_seconds(pids) - agents_began) * 1e3 / requests
    figures = {
        "request_ms_median": percentile(durations_ms, 50),
        "request_ms_p99": percentile(durations_ms, 99),
        "request_ms_least": min(durations_ms),
        "request_driver_processor_ms": percentile(driver_ms, 50),
        "request_agents_processor_ms": agents_ms,
    }
    print(
        f"a request to {slots.world_size} ranks: {figures['request_ms_median']:.1f} ms (p99 "
        f"{figures['request_ms_p99']:.1f}), of which the driver's processor time is "
        f"{figures['request_driver_processor_ms']:.1f} ms; that of all agents {agents_ms:.1f} ms",
        flush=True,
    )
    return figures


def measure_loss(slots: SlotGroup, victim: AgentProcess) -> float:
    """Return the milliseconds from SIGKILL of an agent to the error that names its node.

    Raises:
        RuntimeError: the error names something else.
    """
    pending = slots.submit(TrainBatches(until=1))
    began = time.perf_counter()
    victim.kill()
    failure = pending.exception(WAIT_SECONDS)
    named_ms = (time.perf_counter() - began) * 1e3
    if not isinstance(failure, RankFailed) or failure.host != victim.nodes[0]:
        raise RuntimeError(f"{victim.nodes[0]} was killed, and the driver says: {failure}")
    print(f"a killed agent was named after {named_ms:.0f} ms: {failure}", flush=True)
    return named_ms


def resident_kib() -> float:
    """Return the resident memory of this process."""
    gc.collect()
    return float(psutil.Process().memory_info().rss / 1024)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks.scale", description=__doc__)
    parser.add_argument("--agents", type=int, default=125)
    parser.add_argument("--slots", type=int, default=8, help="ranks of each agent")
    parser.add_argument("--processes", type=int, default=2, help="that share the agents")
    parser.add_argument("--requests", type=int, default=50)
    arguments = parser.parse_args()
    if arguments.agents < 2:
        parser.error("--agents must be at least 2: one is killed")
    scale = Scale(arguments.agents, arguments.slots, arguments.processes)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        figures = measure(scale, arguments.requests, Path(folder))
    conclude({"ranks": scale.ranks, "agents": scale.agents, **figures}, TARGETS)


if __name__ == "__main__":
    main()
