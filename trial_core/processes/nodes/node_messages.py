"""The messages between the driver and the agent of a node.

An agent joins with `AgentHello`. The driver answers `Refused`, or `Welcome`, to which the agent
replies `NodeReady`. It says `Draining` when its node will be taken away. Each launch of ranks has,
in this order: `PrepareRanks` and `RanksPrepared`; `StartRanks`; messages from and to the ranks, and
`RankGone` for each; `EndRanks`.

`trialflow doctor` starts no ranks. It asks each node to `Examine`, then to `Reach` the others, then
to `TryStorage`.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable

import msgspec

from trial_core.checkpoint.manifest import FileEntry
from trial_core.checkpoint.store import StorageSpec
from trial_core.messages import Message, decoding
from trial_core.processes.slots.launcher import MachineShare

ALIVE_SECONDS = 5.0
"""How often each end sends `Alive`."""

SILENCE_SECONDS = 20.0
"""An end that has heard nothing for this long treats the other one as lost."""

PACKAGES = ("trialflow", "torch", "deepspeed")
"""Their versions, and Python's, must be the same on all nodes of a run."""


def own_versions() -> dict[str, str]:
    """The versions of Python and of `PACKAGES` here; ``none`` for a missing package."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "none"
    return versions


class Alive(Message):
    """A sign of life."""


class AgentHello(Message):
    """An agent's first message.

    Attributes:
        node: the name that the provider gave its node; empty: the agent was started by hand.
        slots: how many ranks it was told to offer; None if the driver decides.
        versions: its `own_versions`.
    """

    node: str
    host: str
    pid: int
    slots: int | None
    versions: dict[str, str]


class Welcome(Message):
    """The agent is one of the run's nodes.

    Attributes:
        slots_per_node: how many ranks each node offers; None for one per accelerator.
        environment: the experiment's variables, for the ranks.
        network: where ranks talk to each other; None: where the agent reaches the driver.
    """

    node: str
    slots_per_node: int | None
    environment: dict[str, str]
    network: str | None


class Refused(Message):
    """The driver does not take the node, and closes the connection."""

    why: str


class NodeReady(Message):
    """The node is ready, or it cannot train because of a problem.

    It has room for so many ranks, and this address on their network.
    """

    slots: int = 0
    address: str = ""
    problem: str | None = None


class Draining(Message):
    """The node will be taken away. Its ranks save, and the driver lets the agent leave."""

    why: str


class OfLaunch(Message):
    """A message about a launch of ranks, by its number."""

    launch: int


class RankMessage(OfLaunch):
    """A message about one rank of a launch."""

    rank: int


class PrepareRanks(OfLaunch):
    """Get ready to start ranks.

    Attributes:
        code_digest: SHA-256 of the archive of the code folder; None if `code_folder` is mounted.
        code: the archive; None if it came with an earlier launch.
        code_folder: the code folder on a file system that all machines share.
        storage_key: an object that this node must see there; None if none is known.
        hosts_store: True if rank 0 is on this node.
    """

    environment: dict[str, str]
    code_digest: str | None
    code: bytes | None
    code_folder: str
    storage: StorageSpec
    storage_key: str | None
    hosts_store: bool


class RanksPrepared(OfLaunch):
    """The node can start its ranks, unless there is a problem.

    Rank 0, if it is on this node, will host torch.distributed's store at `store_port`.
    """

    store_port: int = 0
    problem: str | None = None


class StartRanks(OfLaunch):
    share: MachineShare


class RanksNotStarted(OfLaunch):
    why: str


class ToRanks(OfLaunch):
    """An encoded message for every rank of this node."""

    data: bytes


class ForwardSignal(RankMessage):
    """Send a rank a signal. SIGKILL also ends its children."""

    signal: int


class EndRanks(OfLaunch):
    """End the rest of a launch."""


class Leave(Message):
    """The run has ended, or needs the node no longer."""


class RankJoined(RankMessage):
    pid: int


class RankSent(RankMessage):
    """An encoded message of a rank."""

    data: bytes


class RankLeft(RankMessage):
    """A rank's connection has closed, because of `protocol_error` if that is set."""

    protocol_error: str | None


class RankGone(RankMessage):
    """A rank and its children have ended, and its whole log was sent."""

    code: int


class RankLogged(RankMessage):
    data: bytes


class RanksWrote(OfLaunch):
    """How many bytes each rank has written to disks."""

    written_bytes: dict[int, int]


class ListeningNode(msgspec.Struct, frozen=True):
    """A node's address, and the greeting that it sends to each connection."""

    address: str
    port: int
    greeting: str


class Examine(Message):
    """Describe this node, and listen for the other nodes."""

    environment: dict[str, str]


class Examined(Message):
    """The answer to `Examine`.

    Attributes:
        received_at, answered_at: the times by this node's clock, in seconds since 1970.
        packages: the version of each installed Python package.
        accelerators: the ranks' accelerators, for people; empty for the CPU.
        accelerator_problem: why they cannot be used; None if they can.
        operator_problem: why DeepSpeed's operators cannot be compiled for the accelerators.
        shared_memory: the total and the free size of ``/dev/shm`` in bytes, or None if it is
            missing.
        folder: the folder of this node's files, on a disk with `disk_free_bytes`.
        listening: where this node listens for the others, or why it cannot.
    """

    received_at: float
    answered_at: float
    packages: dict[str, str]
    cores: int
    accelerators: str
    accelerator_problem: str | None
    operator_problem: str | None
    shared_memory: tuple[int, int] | None
    folder: str
    disk_free_bytes: int
    listening: ListeningNode | str


class Reach(Message):
    """Connect to the named nodes. This one may be among them."""

    nodes: dict[str, ListeningNode]


class Reached(Message):
    """The answer to `Reach`: why this node cannot connect, for each node that it cannot reach."""

    problems: dict[str, str]


class TryStorage(Message):
    """Read an object of the driver's, and write one of the same size into the same folder."""

    storage: StorageSpec
    folder: str
    object: FileEntry


class StorageTried(Message):
    """The answer to `TryStorage`: how long both objects took, or why they could not be moved."""

    read_seconds: float = 0.0
    write_seconds: float = 0.0
    problem: str | None = None


Question = Examine | Reach | TryStorage
"""A question of `trialflow doctor` to a node."""
NodeAnswer = Examined | Reached | StorageTried
OfRank = RankJoined | RankSent | RankLeft | RankGone | RankLogged
"""An agent's messages about one rank."""
FromAgent = (
    Alive
    | NodeReady
    | Draining
    | RanksPrepared
    | RanksNotStarted
    | RanksWrote
    | OfRank
    | NodeAnswer
)
ToAgent = (
    Alive
    | Welcome
    | Refused
    | PrepareRanks
    | StartRanks
    | ToRanks
    | ForwardSignal
    | EndRanks
    | Question
    | Leave
)

decode_agent_hello: Callable[[bytes], AgentHello] = decoding(AgentHello)
decode_from_agent: Callable[[bytes], FromAgent] = decoding(FromAgent)
decode_to_agent: Callable[[bytes], ToAgent] = decoding(ToAgent)
