"""The driver's questions to nodes, for `trialflow doctor`: what they have, and what they reach."""

from __future__ import annotations

import os
import queue
import secrets
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from trial_core.nodes.hub import ConnectedAgent
from trial_core.nodes.node_messages import (
    Answer,
    Examine,
    Examined,
    FromAgent,
    ListeningNode,
    Question,
    Reach,
    Reached,
    StorageTried,
    TryStorage,
)
from trial_core.storage.base import PROBES, Storage
from trial_core.storage.parallel import CancelSignal

EXAMINE_SECONDS = 360.0
"""Above `trial_core.slots.accelerators.PROBE_TIMEOUT_SECONDS`."""
REACH_SECONDS = 180.0
STORAGE_SECONDS = 300.0

PAIRWISE_NODES = 32
"""Of more nodes, not every one connects to every other one."""

PROBE_BYTES = 16 * 2**20

AnswerT = TypeVar("AnswerT", bound=Answer)


@dataclass(frozen=True)
class Answered(Generic[AnswerT]):
    """A node's answer, and when the driver asked and got it, in seconds since 1970."""

    answer: AnswerT
    asked_at: float
    got_at: float


@dataclass(frozen=True)
class NoAnswer:
    """Why a node has not answered."""

    why: str


@dataclass(frozen=True)
class ClockOffset:
    """How far a node's clock is ahead of the driver's: between ``seconds ± error_seconds``."""

    seconds: float
    error_seconds: float


def examine(
    agents: Sequence[ConnectedAgent], environment: Mapping[str, str]
) -> tuple[dict[str, Answered[Examined] | NoAnswer], dict[str, ListeningNode]]:
    """Ask what nodes have; return their answers, and where each listens, by their names."""
    greetings = {agent.name: secrets.token_hex(16) for agent in agents}
    answers = _ask(
        agents,
        lambda agent: Examine(environment=dict(environment), greeting=greetings[agent.name]),
        Examined,
        EXAMINE_SECONDS,
    )
    listening = {
        agent.name: ListeningNode(agent.address, found.answer.port, greetings[agent.name])
        for agent in agents
        if isinstance(found := answers[agent.name], Answered)
        and found.answer.listen_problem is None
    }
    return answers, listening


def reach(
    agents: Sequence[ConnectedAgent], listening: Mapping[str, ListeningNode]
) -> dict[str, Answered[Reached] | NoAnswer]:
    """Have nodes connect to those that listen."""
    peers = peers_of([agent.name for agent in agents])

    def question(agent: ConnectedAgent) -> Reach:
        nodes = {name: listening[name] for name in peers[agent.name] if name in listening}
        return Reach(nodes=nodes)

    return _ask(agents, question, Reached, REACH_SECONDS)


def peers_of(nodes: Sequence[str]) -> dict[str, list[str]]:
    """Which nodes each node connects to: all others.

    Of more than `PAIRWISE_NODES`, the first one, which hosts torch's store, connects to all and all
    to it; the others connect to their neighbours, as in NCCL's rings.
    """
    if len(nodes) <= PAIRWISE_NODES:
        return {node: [other for other in nodes if other != node] for node in nodes}
    peers = {nodes[0]: list(nodes[1:])}
    for index, node in enumerate(nodes[1:], start=1):
        neighbours = (nodes[0], nodes[index - 1], nodes[(index + 1) % len(nodes)])
        peers[node] = list(dict.fromkeys(neighbours))
    return peers


def try_storage(
    agents: Sequence[ConnectedAgent], storage: Storage
) -> dict[str, Answered[StorageTried] | NoAnswer]:
    """Have nodes read an object that this process writes, and write, read and delete others.

    Nothing stays in the storage.

    Raises:
        StorageError: this process cannot write the object, or delete the last ones.
    """
    keys = {agent.name: _new_key() for agent in agents}
    with _probe(storage) as (key, digest):
        answers = _ask(
            agents,
            lambda agent: TryStorage(
                storage=storage.spec,
                driver_key=key,
                size_bytes=PROBE_BYTES,
                digest=digest,
                own_key=keys[agent.name],
            ),
            StorageTried,
            STORAGE_SECONDS,
        )
        for name, answer in answers.items():
            if isinstance(answer, NoAnswer):  # it may have been lost before it deleted its object
                storage.remove(keys[name])
    return answers


@contextmanager
def _probe(storage: Storage) -> Iterator[tuple[str, str]]:
    """The key and the digest of an object in the storage, which is deleted at the end."""
    key = _new_key()
    with tempfile.NamedTemporaryFile() as file:
        file.write(os.urandom(PROBE_BYTES))
        file.flush()
        try:
            _, digest = storage.upload(Path(file.name), key, CancelSignal())
            yield key, digest
        finally:
            storage.remove(key)


def _new_key() -> str:
    return f"{PROBES}/{uuid.uuid4()}"


def clock_offset(found: Answered[Examined]) -> ClockOffset:
    """How far a node's clock is ahead, as NTP finds it: the way there takes as long as back."""
    there = found.answer.received_at - found.asked_at
    back = found.answer.answered_at - found.got_at
    travelled = found.got_at - found.asked_at
    worked = found.answer.answered_at - found.answer.received_at
    return ClockOffset((there + back) / 2, max(0.0, travelled - worked) / 2)


def _ask(
    agents: Sequence[ConnectedAgent],
    question: Callable[[ConnectedAgent], Question],
    kind: type[AnswerT],
    seconds: float,
) -> dict[str, Answered[AnswerT] | NoAnswer]:
    """Ask all agents at once; return what each has answered, or why it has not."""
    inbox: queue.SimpleQueue[tuple[str, FromAgent | NoAnswer, float]] = queue.SimpleQueue()

    def note(name: str, message: FromAgent) -> None:  # in the hub's thread
        inbox.put((name, message, time.time()))

    def lost(name: str, why: str) -> None:
        inbox.put((name, NoAnswer(f"the node is lost: {why}"), time.time()))

    asked_at: dict[str, float] = {}
    for agent in agents:
        agent.on_message = partial(note, agent.name)
        agent.on_lost = partial(lost, agent.name)
        asked_at[agent.name] = time.time()
        agent.send(question(agent))
        if agent.lost is not None:  # meanwhile
            lost(agent.name, agent.lost)
    answers: dict[str, Answered[AnswerT] | NoAnswer] = {}
    deadline = time.monotonic() + seconds
    while len(answers) < len(agents):
        try:
            name, message, at = inbox.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        if isinstance(message, NoAnswer):
            answers.setdefault(name, message)
        elif isinstance(message, kind):
            answers.setdefault(name, Answered(message, asked_at[name], at))
    silent = NoAnswer(f"no answer within {seconds:g} s")
    return {agent.name: answers.get(agent.name, silent) for agent in agents}
