"""The checks of `trialflow doctor` on the nodes that a run would get."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trial_core.errors import LaunchError, StorageError, TrialflowError
from trial_core.text_format import plural, size
from trialflow.deployments.cli import console
from trialflow.deployments.cli.check import Check
from trialflow.deployments.cli.experiment_options import open_store_of

if TYPE_CHECKING:
    from trial_core.config import ExperimentConfig
    from trial_core.nodes.engine import Engine
    from trial_core.nodes.hub import ConnectedAgent
    from trial_core.nodes.node_messages import Examined, ListeningNode, StorageTried
    from trial_core.nodes.node_pool import NodePool
    from trial_core.nodes.questions import Answered

CLOCK_SECONDS = 2.0
SHARED_MEMORY_BYTES = 2**30
DISK_BYTES = 5 * 2**30
SLOW_BYTES_PER_SECOND = 100 * 2**20
SLOW_FACTOR = 4
"""A node is slow if another one is so many times as fast, and it is below the speed above."""

SHOWN = 8
MANY = 3

SHARED_MEMORY_ADVICE = (
    "NCCL and the processes of data loaders need it; a container gets more with docker run "
    "--shm-size=8g, or in Kubernetes with an emptyDir of medium Memory at /dev/shm"
)
DISK_ADVICE = (
    "the files of a checkpoint that is read are there; TRIALFLOW_HOME names another folder"
)


def check_nodes(experiment: ExperimentConfig) -> Iterator[Check]:
    """Have the experiment's engine find nodes as for a run, and check each; none for ``local``."""
    from trialflow.flows.rank_placement import choose_engine

    try:
        engine = choose_engine(experiment)
        if engine is None:
            return
        with _nodes(experiment, engine) as pool:
            try:
                agents = pool.gather(on_activity=console.note)
                slots = plural(sum(agent.slots for agent in agents), "slot")
                found = f"{plural(len(agents), 'node')} of {engine.name} with {slots}"
                yield Check("nodes", "ok", found)
            except LaunchError as error:
                yield Check("nodes", "fail", str(error))
                agents = pool.joined()
            if agents:
                yield from _checks(experiment, agents)
    except TrialflowError as error:
        yield Check("nodes", "fail", str(error))


@contextmanager
def _nodes(experiment: ExperimentConfig, engine: Engine) -> Iterator[NodePool]:
    """The run's nodes, also those whose packages differ."""
    from trial_core.run.run_dirs import home_folder
    from trialflow.flows.rank_placement import on_nodes

    home = home_folder()
    home.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="doctor-", dir=home) as folder,
        on_nodes(experiment, engine, Path(folder), console.note, same_versions=False) as placement,
    ):
        yield placement.pool


def _checks(experiment: ExperimentConfig, agents: Sequence[ConnectedAgent]) -> Iterator[Check]:
    from trial_core.nodes import questions

    yield versions(agents)
    answers, listening = questions.examine(agents, experiment.rank_variables)
    found = {
        name: each for name, each in answers.items() if not isinstance(each, questions.NoAnswer)
    }
    for agent in agents:
        answer = answers[agent.name]
        if isinstance(answer, questions.NoAnswer):
            yield Check("node", "fail", f"cannot be examined: {answer.why}", node=agent.name)
        else:
            yield from _of_node(agent, answer.answer)
    yield from map(clock, found, found.values())
    yield from differences({name: each.answer for name, each in found.items()})
    there = [agent for agent in agents if agent.name in found]
    yield from _reachability(there, listening)
    yield from _storage(experiment, there)


def versions(agents: Sequence[ConnectedAgent]) -> Check:
    """Check that the versions without which a run refuses nodes are the same."""
    first = agents[0].versions
    different = [
        f"{name} {text}"
        for name in first
        if (text := difference({agent.name: agent.versions.get(name, "none") for agent in agents}))
    ]
    if different:
        advice = "install the same versions on all nodes: a run refuses nodes that differ"
        return Check("versions", "fail", "; ".join(different), advice)
    shown = ", ".join(f"{name} {version}" for name, version in first.items())
    return Check("versions", "ok", f"{shown} on {_nodes_text([each.name for each in agents])}")


def _of_node(agent: ConnectedAgent, found: Examined) -> Iterator[Check]:
    """What can be said of one node alone."""
    name = agent.name
    what = [
        f"{agent.host}, at {agent.address}", plural(agent.slots, "slot"),
        plural(found.cores, "core"), found.accelerators or "no accelerators",
    ]  # fmt: skip
    yield Check("node", "ok", ", ".join(what), node=name)
    if found.accelerator_problem is not None:
        yield Check("accelerators", "fail", found.accelerator_problem, node=name)
    if found.operator_problem is not None:
        yield Check("nvcc", "warn", found.operator_problem, node=name)
    if found.shared_memory is not None:
        total, free = found.shared_memory
        is_small = free < SHARED_MEMORY_BYTES
        advice = SHARED_MEMORY_ADVICE if is_small else ""
        text = f"{size(free)} of {size(total)} free"
        yield Check("/dev/shm", "warn" if is_small else "ok", text, advice, name)
    is_full = found.disk_free_bytes < DISK_BYTES
    text = f"{size(found.disk_free_bytes)} free in {found.folder}"
    yield Check("disk", "warn" if is_full else "ok", text, DISK_ADVICE if is_full else "", name)


def clock(node: str, found: Answered[Examined]) -> Check:
    """Compare a node's clock with this machine's."""
    from trial_core.nodes.questions import clock_offset

    offset = clock_offset(found)
    is_wrong = abs(offset.seconds) - offset.error_seconds > CLOCK_SECONDS
    way = "ahead of" if offset.seconds >= 0 else "behind"
    text = f"{abs(offset.seconds):.3f} s {way} this machine's (± {offset.error_seconds:.3f} s)"
    advice = (
        "set the wrong one (NTP, chrony): object storages refuse requests that are signed by a "
        "clock that is 15 minutes off, and times in logs are misleading before"
    )
    return Check("clock", "warn" if is_wrong else "ok", text, advice if is_wrong else "", node)


def differences(found: Mapping[str, Examined]) -> Iterator[Check]:
    """What differs between nodes and need not be the same, but may be why one fails."""
    if len(found) < 2:
        return
    from trial_core.nodes.versions import PACKAGES

    accelerators = {name: each.accelerators or "none" for name, each in found.items()}
    if text := difference(accelerators):
        yield Check("accelerators", "warn", text, "the ranks wait for the slowest of them")
    names = sorted({name for each in found.values() for name in each.packages} - {*PACKAGES})
    different = [
        f"{name} {text}"
        for name in names
        if (
            text := difference(
                {node: each.packages.get(name, "none") for node, each in found.items()}
            )
        )
    ]
    if not different:
        yield Check("packages", "ok", f"the same {len(names)} others on {_nodes_text([*found])}")
        return
    rest = len(different) - SHOWN
    more = [f"and {rest} more"] if rest > 0 else []
    yield Check(
        "packages", "warn", "; ".join([*different[:SHOWN], *more]),
        "install the same ones, as from one lock file or image",
    )  # fmt: skip


def difference(values: Mapping[str, str]) -> str | None:
    """``1.26 on 61 nodes, 2.0 on node7``; None: all nodes have the same.

    Args:
        values: by the names of nodes.
    """
    nodes: dict[str, list[str]] = defaultdict(list)
    for node, value in values.items():
        nodes[value].append(node)
    if len(nodes) < 2:
        return None
    groups = sorted(nodes.items(), key=lambda group: (-len(group[1]), group[1]))
    return ", ".join(f"{value} on {_nodes_text(names)}" for value, names in groups)


def _nodes_text(names: Sequence[str]) -> str:
    if len(names) > SHOWN:
        return plural(len(names), "node")
    return ", ".join(names)


def _reachability(
    agents: Sequence[ConnectedAgent], listening: Mapping[str, ListeningNode]
) -> Iterator[Check]:
    """Check that nodes can connect to each other where their ranks talk."""
    from trial_core.nodes import questions

    places = {agent.name: f"{agent.name} ({agent.host}, {agent.address})" for agent in agents}
    if len(agents) < 2:
        return
    peers = questions.peers_of([agent.name for agent in agents])
    for agent in agents:
        if agent.name not in listening:
            yield Check("network", "fail", f"cannot listen at {agent.address}", node=agent.name)
    for name, answer in questions.reach(agents, listening).items():
        if isinstance(answer, questions.NoAnswer):
            yield Check("network", "fail", answer.why, node=name)
            continue
        for other, why in answer.answer.problems.items():
            yield Check(
                "network", "fail",
                f"{places[name]} cannot connect to {places[other]}, port {listening[other].port}: "
                f"{why}",
                "ranks talk to each other on any port: look at firewalls and routes, or choose "
                "another network (resources.network)",
                name,
            )  # fmt: skip
        if not answer.answer.problems and (reached := [*filter(listening.get, peers[name])]):
            yield Check("network", "ok", f"connects to {_nodes_text(reached)}", node=name)


def _storage(experiment: ExperimentConfig, agents: Sequence[ConnectedAgent]) -> Iterator[Check]:
    """Check that nodes can use the storage, and how fast it is there."""
    from trial_core.nodes import questions

    try:
        storage = open_store_of(experiment).storage
        answers = questions.try_storage(agents, storage)
    except StorageError as error:
        yield Check("storage", "fail", f"not tried on the nodes: {error}")
        return
    tried: dict[str, StorageTried] = {}
    for name, answer in answers.items():
        why = answer.why if isinstance(answer, questions.NoAnswer) else answer.answer.problem
        if why is not None:
            yield Check("storage", "fail", why, node=name)
        elif not isinstance(answer, questions.NoAnswer):
            tried[name] = answer.answer
    slow = slow_nodes(tried)
    for name, each in tried.items():
        read, write = _speed(each.read_seconds), _speed(each.write_seconds)
        yield Check(
            "storage", "warn" if name in slow else "ok",
            f"{storage.url}: reads {size(int(read))}/s, writes {size(int(write))}/s",
            f"{slow[name]} is {SLOW_FACTOR} times as fast, or more" if name in slow else "",
            name,
        )  # fmt: skip


def slow_nodes(tried: Mapping[str, StorageTried]) -> dict[str, str]:
    """The nodes that are much slower than another one, and that one."""
    slow: dict[str, str] = {}
    for way in ("read_seconds", "write_seconds"):
        speeds = {name: _speed(getattr(each, way)) for name, each in tried.items()}
        fastest = max(speeds, key=lambda name: speeds[name], default="")
        for name, speed in speeds.items():
            if speed < SLOW_BYTES_PER_SECOND and speed * SLOW_FACTOR <= speeds[fastest]:
                slow[name] = fastest
    return slow


def _speed(seconds: float) -> float:
    """Bytes per second."""
    from trial_core.nodes.questions import PROBE_BYTES

    return PROBE_BYTES / max(seconds, 1e-6)
