"""Where a run gets its nodes from: a node provider finds machines, and starts an agent on each.

The agent (`agent`) joins the driver, and starts, watches and ends that node's ranks. The driver
itself notices an agent that is gone (`hub`), whatever the provider. So a provider only has to find
machines, to start programs on them, to say why a program has not started, and to give the machines
back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

AGENT_MODULE = "trial_core.launch.nodes.agent_main"
"""What a provider starts: ``python -m`` this, with the node's own Python."""

NODE_SECONDS = 60.0
"""How long a provider may take to say that it cannot start an agent."""


@dataclass(frozen=True)
class NodeRequest:
    """The nodes that a run needs.

    Attributes:
        slots: how many ranks they have room for together, at most as many as the run uses.
        min_slots: with room for fewer ranks, the run cannot train.
        slots_per_node: the ranks of each node; None: one per accelerator of the node, or two on the
            CPU.
        on_cpu: whether ranks use no accelerators, also where there are some.
    """

    slots: int
    min_slots: int
    slots_per_node: int | None = None
    on_cpu: bool = False


@dataclass(frozen=True)
class Node:
    """A machine, or a part of one, that a provider has given to a run.

    Attributes:
        name: identifies it among the nodes of the run, replacements included; a host name is part
            of it.
        slots: how many ranks it has room for.
    """

    name: str
    slots: int


@dataclass(frozen=True)
class AgentEnded:
    """The agent of a node has ended, could not be started, or the provider has lost the node.

    Attributes:
        why: what the provider knows, for people: an exit code, the last lines of what it wrote.
    """

    node: str
    why: str


@dataclass(frozen=True)
class NodeDraining:
    """A node will be taken away. Its agent still runs.

    Attributes:
        why: what the provider knows, for people.
        can_stay: whether the provider waits until the run leaves the node.
    """

    node: str
    why: str
    can_stay: bool = False


GangEvent = AgentEnded | NodeDraining


class Gang(Protocol):
    """The nodes of one run. Its methods are called by one thread at a time."""

    @property
    def nodes(self) -> Sequence[Node]:
        """The nodes that the run has now."""

    def start(self, node: Node, arguments: Sequence[str], token: str) -> None:
        """Start the agent of a node. Returns at once; `events` tells what became of it.

        Args:
            arguments: of `AGENT_MODULE`.
            token: written to the agent's standard input, which is then closed. No other user of the
                node may see it.
        """

    def events(self) -> Sequence[GangEvent]:
        """What has happened to the nodes since the last call. Returns at once.

        An agent that ends is told whatever the reason, and a node that drains once.
        """

    def give_up(self, node: Node) -> None:
        """Give a node back, which is lost or drains, or whose agent has ended."""

    def offer(self) -> Node | None:
        """One more node for the request, if there is one now. Returns at once.

        It may be a machine that was given up, if that is well, but has another name.
        """

    def release(self) -> None:
        """Give all nodes back, and end the agents that still run. A second call does nothing."""


class NodeProvider(Protocol):
    """Finds the machines of a run, and starts the agents on them."""

    name: str
    """As in ``resources.engine``."""

    def acquire(
        self, request: NodeRequest, seconds: float, should_abort: Callable[[], bool]
    ) -> Gang:
        """Wait for the nodes of a request: as many as there are, at least those that it needs.

        Args:
            seconds: how long to wait.
            should_abort: asked meanwhile whether to give up; then LaunchError.

        Raises:
            LaunchError: there are too few within that time, or there never will be, or the provider
                cannot be reached. The message says what was asked for, what there is, and what to
                do. Nothing stays behind.
        """
