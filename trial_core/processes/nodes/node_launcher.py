"""Starts a slot group's ranks on the run's nodes, and relays between the group and their agents."""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from trial_core.checkpoint.store import StorageSpec
from trial_core.errors import LaunchError, RankFailed, Stopped
from trial_core.messages import Message, Peer, decode_from_rank, encode
from trial_core.processes.nodes.hub import ConnectedAgent
from trial_core.processes.nodes.node_messages import (
    EndRanks,
    ForwardSignal,
    FromAgent,
    OfRank,
    PrepareRanks,
    RankJoined,
    RankLeft,
    RankLogged,
    RankSent,
    RanksNotStarted,
    RanksPrepared,
    RanksWrote,
    StartRanks,
    ToRanks,
)
from trial_core.processes.slots.launcher import (
    LaunchRequest,
    MachineShare,
    RankConnections,
)
from trial_core.processes.slots.rank_handle import RankHandle

PREPARE_SECONDS = 120.0
"""How long a node may take to unpack the code and to check the storage."""

POLL_SECONDS = 0.2

_LAUNCHES = itertools.count(1)


class RemoteRank(RankHandle):
    """A rank of another machine. Its log is also written here, as its agent sends it."""

    def __init__(
        self,
        rank: int,
        log_path: Path,
        agent: ConnectedAgent,
        launch: int,
        on_exit: Callable[[int, int], None],
    ) -> None:
        super().__init__(rank, agent.name, log_path, on_exit)
        self.disk_bytes = 0
        self.agent = agent
        self._launch = launch
        log_path.touch()

    def signal(self, number: int) -> None:
        self.agent.send(ForwardSignal(launch=self._launch, rank=self.rank, signal=number))

    def written_bytes(self) -> int:
        return self.disk_bytes + self.log_size()

    def lost(self) -> None:
        """Note that its node is lost; the agent, if it lives, ends the rank."""
        self._ended.set()


@dataclass(frozen=True)
class NodeCode:
    """The code that the ranks start in; `archive` is None if every node has the folder."""

    archive: bytes | None
    folder: Path


def launch_on_nodes(
    agents: Sequence[ConnectedAgent],
    code: NodeCode,
    storage: StorageSpec,
    storage_key: str | None,
    launch: LaunchRequest,
    ranks: list[RankHandle],
) -> NodeConnections:
    """Start ranks on nodes that have joined, as a `Launcher` does.

    They are numbered in the order of the agents. Every node must see the object `storage_key` in
    the storage; None: nodes are not asked.
    """
    shares = shares_of(launch.world_size, [agent.slots for agent in agents])
    connections = NodeConnections(launch, list(zip(agents, shares, strict=True)))
    try:
        connections.prepare(code, storage, storage_key)
        connections.start(ranks)
    except BaseException:
        connections.close()
        connections.give_up()
        raise
    return connections


def shares_of(world_size: int, slots: Sequence[int]) -> list[range]:
    """The ranks of each node: one per slot, in the order of the nodes.

    Raises LaunchError if the nodes have too few slots, or one would get no rank.
    """
    shares, first = [], 0
    for offered in slots:
        last = min(first + offered, world_size)
        shares.append(range(first, last))
        first = last
    if first < world_size or not all(shares):
        raise LaunchError(
            f"{world_size} ranks cannot be spread over nodes with {', '.join(map(str, slots))} "
            "slots"
        )
    return shares


class NodeConnections(RankConnections):
    """The connections of one launch, through the agents of its nodes."""

    def __init__(self, launch: LaunchRequest, shares: list[tuple[ConnectedAgent, range]]) -> None:
        self._launch = launch
        self._shares = shares
        self._number = next(_LAUNCHES)
        self._has_started = False
        launch.log_dir.mkdir(parents=True, exist_ok=True)
        self._ranks = {
            rank: RemoteRank(
                rank, launch.log_dir / f"rank-{rank}.log", agent, self._number, launch.on_exit
            )
            for agent, share in shares
            for rank in share
        }
        self._prepared: dict[str, RanksPrepared] = {}
        self._lost: dict[str, str] = {}
        self._changed = threading.Condition()
        for agent, share in shares:
            agent.on_lost = partial(self._node_lost, agent, share)
            agent.on_message = partial(self._receive, agent, share)
            if agent.lost is not None:  # meanwhile
                self._node_lost(agent, share, agent.lost)

    def prepare(self, code: NodeCode, storage: StorageSpec, storage_key: str | None) -> None:
        """Have all nodes unpack the code, and check that they see the storage.

        Raises:
            LaunchError: a node cannot, or does not answer in time.
            RankFailed: a node is lost.
            Stopped: the run was asked to stop meanwhile.
        """
        digest = None if code.archive is None else hashlib.sha256(code.archive).hexdigest()
        for agent, share in self._shares:
            is_new = digest is not None and agent.code_digest != digest
            agent.send(
                PrepareRanks(
                    launch=self._number,
                    environment=dict(self._launch.environment),
                    code_digest=digest,
                    code=code.archive if is_new else None,
                    code_folder=str(code.folder),
                    storage=storage,
                    storage_key=storage_key,
                    hosts_store=0 in share,
                )
            )
            agent.code_digest = digest
        deadline = time.monotonic() + PREPARE_SECONDS
        with self._changed:
            while not self._changed.wait_for(
                lambda: self._lost or len(self._prepared) == len(self._shares), POLL_SECONDS
            ):
                if self._launch.should_abort():
                    raise Stopped("the run was stopped while its nodes got ready")
                if time.monotonic() > deadline:
                    break
        self._check_lost()
        for agent, _ in self._shares:
            answer = self._prepared.get(agent.name)
            if answer is not None and answer.problem is not None:
                raise LaunchError(
                    f"node {agent.name} cannot start its ranks: {answer.problem}", agent.name
                )
        if silent := [a.name for a, _ in self._shares if a.name not in self._prepared]:
            raise LaunchError(
                f"node {', '.join(silent)} did not unpack the code and look into the storage "
                f"within {PREPARE_SECONDS:g} s",
                silent[0],
            )

    def _check_lost(self) -> None:
        """Raise RankFailed, so that the run may start its ranks again, if a node is lost."""
        for agent, share in self._shares:
            if (why := self._lost.get(agent.name)) is not None:
                raise RankFailed(rank=share[0], host=agent.name, during="its start", node_lost=why)

    def start(self, ranks: list[RankHandle]) -> None:
        """Start the ranks. Each is added to `ranks` before. Raises RankFailed if a node is lost."""
        launch, (first, _) = self._launch, self._shares[0]
        store = first.address, self._prepared[first.name].store_port
        with self._changed:
            ranks.extend(self._ranks[rank] for rank in range(launch.world_size))
            self._has_started = True  # from here on, the listener hears of a lost node
            self._check_lost()
        for index, (agent, share) in enumerate(self._shares):
            place = MachineShare(
                share[0], len(share), launch.world_size, store, agent.address, index,
                len(self._shares),
            )  # fmt: skip
            agent.send(StartRanks(launch=self._number, share=place))

    def send(self, message: Message) -> None:
        data = encode(message)
        for agent, _ in self._shares:
            agent.send(ToRanks(launch=self._number, data=data))

    def close(self) -> None:
        for agent, _ in self._shares:
            agent.on_message, agent.on_lost = lambda message: None, lambda why: None
            agent.send(EndRanks(launch=self._number))

    def give_up(self) -> None:
        """Wait for no rank: none was started, or its agent ends it."""
        for rank in self._ranks.values():
            rank.lost()

    # -------------------------------------------------------------------- in the hub's thread

    def _receive(self, agent: ConnectedAgent, share: range, message: FromAgent) -> None:
        if getattr(message, "launch", None) != self._number:
            return  # of an earlier launch
        if isinstance(message, RanksPrepared):
            with self._changed:
                self._prepared[agent.name] = message
                self._changed.notify_all()
        elif isinstance(message, RanksNotStarted):
            for rank in share:
                self._ranks[rank].lost()
            self._launch.listener.node_lost(share, f"its agent cannot start them: {message.why}")
        elif isinstance(message, RanksWrote):
            for rank, count in message.written_bytes.items():
                if rank in share:
                    self._ranks[rank].disk_bytes = count
        elif isinstance(message, OfRank) and message.rank in share:  # its own ranks
            self._of_rank(agent, message)

    def _of_rank(self, agent: ConnectedAgent, message: OfRank) -> None:
        listener, rank = self._launch.listener, self._ranks[message.rank]
        if isinstance(message, RankJoined):
            rank.pid = message.pid
            listener.rank_joined(Peer(rank=rank.rank, pid=message.pid, host=agent.name))
        elif isinstance(message, RankSent):
            try:
                decoded = decode_from_rank(message.data)
            except msgspec.MsgspecError as error:
                listener.rank_disconnected(rank.rank, f"sent an invalid message: {error}")
            else:
                listener.message_received(rank.rank, decoded)
        elif isinstance(message, RankLeft):
            listener.rank_disconnected(rank.rank, message.protocol_error)
        elif isinstance(message, RankLogged):
            with rank.log_path.open("ab") as log:
                log.write(message.data)
        else:
            rank.ended(message.code)

    def _node_lost(self, agent: ConnectedAgent, share: range, why: str) -> None:
        with self._changed:
            self._lost[agent.name] = why
            has_started = self._has_started
            self._changed.notify_all()
        for rank in share:
            self._ranks[rank].lost()
        if has_started:
            self._launch.listener.node_lost(share, why)
