"""The checks of `trialflow doctor` on the nodes that a run would get."""

from __future__ import annotations

import hashlib
import os
import queue
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from trial_core.checkpoint.layout import StoredPath
from trial_core.checkpoint.manifest import FileEntry
from trial_core.checkpoint.storage.base import PROBES, Storage
from trial_core.common.text_format import plural, size
from trial_core.config import ExperimentConfig
from trial_core.driver.placement import choose_provider, on_nodes
from trial_core.errors import LaunchError, StorageError, TrialflowError
from trial_core.messages import Message
from trial_core.processes.machine.run_dirs import home_folder
from trial_core.processes.nodes.hub import ConnectedAgent
from trial_core.processes.nodes.node_messages import (
    PACKAGES,
    Examine,
    Examined,
    FromAgent,
    ListeningNode,
    NodeAnswer,
    Question,
    Reach,
    Reached,
    StorageTried,
    TryStorage,
)
from trialflow.deployments.cli import console
from trialflow.deployments.cli.check import Check
from trialflow.deployments.cli.experiment_options import open_store_of
from trialflow.deployments.cli.waiting import waiting

CLOCK_SECONDS = 2.0
SHARED_MEMORY_BYTES = 2**30
DISK_BYTES = 5 * 2**30
SLOW_BYTES_PER_SECOND = 100 * 2**20
SLOW_FACTOR = 4
"""A node is slow if another is this many times as fast, and it is below the speed above."""

PROBE_BYTES = 16 * 2**20
SHOWN = 8
ANSWER_SECONDS: dict[type[Message], float] = {
    Examined: 360.0,  # above `trial_core.processes.machine.accelerators.PROBE_TIMEOUT_SECONDS`
    Reached: 180.0,
    StorageTried: 300.0,
}

AnswerT = TypeVar("AnswerT", bound=NodeAnswer)

SHARED_MEMORY_ADVICE = (
    "NCCL and the processes of data loaders need it; a container gets more with docker run "
    "--shm-size=8g, or in Kubernetes with an emptyDir of medium Memory at /dev/shm"
)
DISK_ADVICE = (
    "the files of a checkpoint that is read are there; TRIALFLOW_HOME names another folder"
)
CLOCK_ADVICE = (
    "set the wrong one (NTP, chrony): object storages refuse requests that are signed by a clock "
    "that is 15 minutes off, and times in logs are misleading before"
)
NETWORK_ADVICE = (
    "ranks talk to each other on any port: look at firewalls and routes, or choose another network "
    "(resources.network)"
)


def check_nodes(experiment: ExperimentConfig) -> Iterator[Check]:
    """Find the nodes of the experiment as a run does, and check each; ``local`` has none."""
    home = home_folder()
    home.mkdir(parents=True, exist_ok=True)
    try:
        provider = choose_provider(experiment)
        if provider is None:
            return
        with (
            tempfile.TemporaryDirectory(prefix="doctor-", dir=home) as folder,
            # Also nodes whose packages differ.
            on_nodes(
                experiment, provider, Path(folder), console.note, same_versions=False
            ) as placement,
        ):
            try:
                agents = placement.pool.gather(on_activity=console.note)
                slots = plural(sum(agent.slots for agent in agents), "slot")
                found = f"{plural(len(agents), 'node')} of {provider.name} with {slots}"
                yield Check("nodes", "ok", found)
            except LaunchError as error:
                yield Check("nodes", "fail", str(error))
                agents = placement.pool.joined()
            if agents:
                yield from _checks(experiment, agents)
    except TrialflowError as error:
        yield Check("nodes", "fail", str(error))


def _checks(experiment: ExperimentConfig, agents: Sequence[ConnectedAgent]) -> Iterator[Check]:
    yield versions(agents)
    question = Examine(environment=dict(experiment.rank_variables))
    answers = yield from ask("node", agents, question, Examined)
    found = {name: each.answer for name, each in answers.items()}
    there = [agent for agent in agents if agent.name in found]
    for agent in there:
        yield from _of_node(agent, answers[agent.name])
    yield from differences(found)
    yield from _reachability(there, found)
    try:
        yield from storage_checks(open_store_of(experiment).storage, there)
    except StorageError as error:
        yield Check("storage", "fail", f"not tried on the nodes: {error}")


@dataclass(frozen=True)
class Answered(Generic[AnswerT]):
    """A node's answer, and when the driver asked and got it, in seconds since 1970."""

    answer: AnswerT
    asked_at: float
    got_at: float


def ask(
    subject: str, agents: Sequence[ConnectedAgent], question: Question, kind: type[AnswerT]
) -> Generator[Check, None, dict[str, Answered[AnswerT]]]:
    """Ask all nodes at once; return their answers. A node without one is a failed check."""
    inbox: queue.SimpleQueue[tuple[str, FromAgent | str, float]] = queue.SimpleQueue()

    def note(name: str, message: FromAgent | str) -> None:  # in the hub's thread
        inbox.put((name, message, time.time()))

    asked_at: dict[str, float] = {}
    for agent in agents:
        agent.on_message = agent.on_lost = partial(note, agent.name)
        asked_at[agent.name] = time.time()
        agent.send(question)
        if agent.lost is not None:  # meanwhile
            note(agent.name, agent.lost)
    answers: dict[str, Answered[AnswerT]] = {}
    deadline = time.monotonic() + ANSWER_SECONDS[kind]
    while asked_at:
        try:
            with waiting(f"waiting for {plural(len(asked_at), 'node')}: {subject}"):
                name, message, at = inbox.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        if name in asked_at and isinstance(message, (str, kind)):
            began = asked_at.pop(name)
            if isinstance(message, str):
                yield Check(subject, "fail", f"the node is lost: {message}", node=name)
            else:
                answers[name] = Answered(message, began, at)
    for name in asked_at:
        yield Check(subject, "fail", f"no answer within {ANSWER_SECONDS[kind]:g} s", node=name)
    return {agent.name: answers[agent.name] for agent in agents if agent.name in answers}


def versions(agents: Sequence[ConnectedAgent]) -> Check:
    """Check that the versions without which a run refuses nodes are the same."""
    first = agents[0].versions
    if different := _different(first, {agent.name: agent.versions for agent in agents}):
        advice = "install the same versions on all nodes: a run refuses nodes that differ"
        return Check("versions", "fail", "; ".join(different), advice)
    shown = ", ".join(f"{name} {version}" for name, version in first.items())
    return Check("versions", "ok", f"{shown} on {_nodes_text([each.name for each in agents])}")


def _of_node(agent: ConnectedAgent, answer: Answered[Examined]) -> Iterator[Check]:
    """Check properties of one node alone."""
    name, found = agent.name, answer.answer
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
        text, is_small = f"{size(free)} of {size(total)} free", free < SHARED_MEMORY_BYTES
        yield _limit("/dev/shm", is_small, text, SHARED_MEMORY_ADVICE, name)
    text = f"{size(found.disk_free_bytes)} free in {found.folder}"
    yield _limit("disk", found.disk_free_bytes < DISK_BYTES, text, DISK_ADVICE, name)
    yield _clock(name, answer)


def _limit(subject: str, is_limited: bool, found: str, advice: str, node: str) -> Check:
    """Return a warning with its advice if training is limited, else a passed check."""
    if is_limited:
        return Check(subject, "warn", found, advice, node)
    return Check(subject, "ok", found, node=node)


def _clock(node: str, found: Answered[Examined]) -> Check:
    """Compare a node's clock with this machine's, as NTP: the way there takes as long as back."""
    there = found.answer.received_at - found.asked_at
    back = found.answer.answered_at - found.got_at
    seconds, error_seconds = (there + back) / 2, max(0.0, there - back) / 2
    is_wrong = abs(seconds) - error_seconds > CLOCK_SECONDS
    way = "ahead of" if seconds >= 0 else "behind"
    text = f"{abs(seconds):.3f} s {way} this machine's (± {error_seconds:.3f} s)"
    return _limit("clock", is_wrong, text, CLOCK_ADVICE, node)


def differences(found: Mapping[str, Examined]) -> Iterator[Check]:
    """Report differences between nodes that are allowed, but may be why one fails."""
    if len(found) < 2:
        return
    accelerators = {name: each.accelerators or "none" for name, each in found.items()}
    if text := difference(accelerators):
        yield Check("accelerators", "warn", text, "the ranks wait for the slowest of them")
    packages = {name: each.packages for name, each in found.items()}
    names = sorted({name for each in packages.values() for name in each} - {*PACKAGES})
    different = _different(names, packages)
    if not different:
        yield Check("packages", "ok", f"the same {len(names)} others on {_nodes_text([*found])}")
        return
    advice = "install the same ones, as from one lock file or image"
    yield Check("packages", "warn", "; ".join(_some(different)), advice)


def _different(names: Iterable[str], packages: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return how packages differ between nodes, without the packages that do not differ."""
    found = (
        (name, difference({node: has.get(name, "none") for node, has in packages.items()}))
        for name in names
    )
    return [f"{name} {text}" for name, text in found if text]


def difference(values: Mapping[str, str]) -> str | None:
    """Return ``1.26 on 61 nodes, 2.0 on node7``, or None if all nodes have the same.

    Args:
        values: the values, by the names of nodes.
    """
    nodes: dict[str, list[str]] = defaultdict(list)
    for node, value in values.items():
        nodes[value].append(node)
    if len(nodes) < 2:
        return None
    groups = sorted(nodes.items(), key=lambda group: (-len(group[1]), group[1]))
    return ", ".join(f"{value} on {_nodes_text(names)}" for value, names in groups)


def _some(texts: Sequence[str]) -> list[str]:
    """Return the first ones, and how many more there are."""
    rest = len(texts) - SHOWN
    return [*texts[:SHOWN], *([f"and {rest} more"] if rest > 0 else [])]


def _nodes_text(names: Sequence[str]) -> str:
    if len(names) > SHOWN:
        return plural(len(names), "node")
    return ", ".join(names)


def _reachability(
    agents: Sequence[ConnectedAgent], found: Mapping[str, Examined]
) -> Iterator[Check]:
    """Check that nodes can connect to each other where their ranks talk."""
    if len(agents) < 2:
        return
    listening: dict[str, ListeningNode] = {}
    for agent in agents:
        where = found[agent.name].listening
        if isinstance(where, ListeningNode):
            listening[agent.name] = where
        else:
            problem = f"cannot listen at {agent.address}: {where}"
            yield Check("network", "fail", problem, node=agent.name)
    places = {agent.name: f"{agent.name} ({agent.host}, {agent.address})" for agent in agents}
    answers = yield from ask("network", agents, Reach(nodes=listening), Reached)
    for name, each in answers.items():
        problems = [
            f"{places[name]} cannot connect to {places[other]}, port {listening[other].port}: {why}"
            for other, why in each.answer.problems.items()
        ]
        for problem in _some(problems):
            yield Check("network", "fail", problem, NETWORK_ADVICE, name)
        others = [other for other in listening if other != name]
        if others and not problems:
            yield Check("network", "ok", f"connects to {_nodes_text(others)}", node=name)


def storage_checks(storage: Storage, agents: Sequence[ConnectedAgent]) -> Iterator[Check]:
    """Check that nodes can use the storage, and how fast it is there. Nothing stays there.

    Raises:
        StorageError: this process cannot write an object there, or delete the objects.
    """
    folder, data = f"{PROBES}/{uuid.uuid4()}", os.urandom(PROBE_BYTES)
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    entry = FileEntry(
        path=StoredPath("of-the-driver"), size_bytes=PROBE_BYTES, digest=digest, rank=0
    )
    try:
        with waiting(f"writing to {storage.url}"):
            storage.write(f"{folder}/{entry.checked_path}", data)
        question = TryStorage(storage=storage.spec, folder=folder, object=entry)
        answers = yield from ask("storage", agents, question, StorageTried)
    finally:
        storage.clear(folder)  # including files of nodes that were lost meanwhile
    tried: dict[str, StorageTried] = {}
    for name, each in answers.items():
        if each.answer.problem is None:
            tried[name] = each.answer
        else:
            yield Check("storage", "fail", each.answer.problem, node=name)
    slow = slow_nodes(tried)
    for name, seconds in tried.items():
        read, write = _speed(seconds.read_seconds), _speed(seconds.write_seconds)
        text = f"{storage.url}: reads {size(int(read))}/s, writes {size(int(write))}/s"
        advice = f"{slow.get(name)} is {SLOW_FACTOR} times as fast, or more"
        yield _limit("storage", name in slow, text, advice, name)


def slow_nodes(tried: Mapping[str, StorageTried]) -> dict[str, str]:
    """Return the nodes that are much slower than another one, and that one."""
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
    return PROBE_BYTES / max(seconds, 1e-6)
