"""Finds a run's nodes: a node provider finds machines, and starts an agent on each.

The agent (`agent`) joins the driver, and starts, watches and ends that node's ranks. The driver
itself notices an agent that is gone (`hub`), whatever the provider. So a provider only has to find
machines, start programs on them, say why a program has not started, and give machines back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

AGENT_MODULE = "trial_core.processes.nodes.agent_main"
"""The module of the agent; the arguments that a `Gang` starts begin with its name."""

NODE_SECONDS = 60.0
"""How long a provider may take to say that it cannot start an agent."""


@dataclass(frozen=True)
class NodeRequest:
    """The nodes that a run needs.

    Attributes:
        slots: how many ranks they have room for together; at most as many as the run uses.
        min_slots: the run cannot train with room for fewer ranks.
        slots_per_node: the ranks of each node; None: one per accelerator of the node, or two on the
            CPU.
        on_cpu: True if ranks use no accelerators, even where there are some.
    """

    slots: int
    min_slots: int
    slots_per_node: int | None = None
    on_cpu: bool = False


@dataclass(frozen=True)
class Node:
    """A machine, or a part of one, that a provider has given to a run.

    The name contains a host's, and is unique among all the run's nodes, replacements included.
    """

    name: str
    slots: int


@dataclass(frozen=True)
class AgentEnded:
    """The agent of a node has ended, could not be started, or the provider has lost the node.

    `why`, for people, has an exit code and the last lines of the output, if there are any.
    """

    node: str
    why: str


@dataclass(frozen=True)
class NodeDraining:
    """A node will be taken away; if it `can_stay`, once the run has left it. Its agent runs on."""

    node: str
    why: str
    can_stay: bool = False


GangEvent = AgentEnded | NodeDraining


class Gang(Protocol):
    """The nodes of one run. Only one thread at a time calls its methods."""

    @property
    def nodes(self) -> Sequence[Node]:
        """The nodes that the run has now."""

    def start(self, node: Node, arguments: Sequence[str], token: str) -> None:
        """Start the agent of a node. Returns at once; `events` reports the outcome.

        Args:
            arguments: of the node's own Python.
            token: written to the agent's standard input, which is then closed. No other user of the
                node may see it.
        """

    def events(self) -> Sequence[GangEvent]:
        """The events of the nodes since the last call. Returns at once.

        The end of an agent is told whatever the reason, and the draining of a node once.
        """

    def give_up(self, node: Node) -> None:
        """Give back a node that is lost or drains, or whose agent has ended."""

    def offer(self) -> Node | None:
        """One more node for the request, if one is available now. Returns at once.

        It may be a machine that was given up, if it works again; its name is then another.
        """

    def release(self) -> None:
        """Give all nodes back, and end the agents that still run. A second call does nothing."""


class NodeProvider(Protocol):
    """Finds the machines of a run, and starts the agents on them."""

    name: str
    """Its name in ``resources.engine``."""

    def acquire(
        self, request: NodeRequest, seconds: float, should_abort: Callable[[], bool]
    ) -> Gang:
        """Wait for the nodes of a request: as many as possible, at least those that it needs.

        Args:
            seconds: how long to wait.
            should_abort: asked meanwhile; True to give up, with LaunchError.

        Raises:
            LaunchError: there are too few nodes within that time, or there never will be, or the
                provider cannot be reached. The message names the request, the available machines,
                and a remedy. Nothing stays behind.
        """


class JoinProvider(NodeProvider):
    """Starts nothing: a person or another launcher runs `trialflow join` on each node."""

    name = "join"

    def acquire(
        self, request: NodeRequest, seconds: float, should_abort: Callable[[], bool]
    ) -> Gang:
        return _NoGang()


class _NoGang(Gang):
    """The nodes that a provider knows: none. So `start` and `give_up` are never called."""

    nodes: Sequence[Node] = ()

    def start(self, node: Node, arguments: Sequence[str], token: str) -> None: ...

    def events(self) -> Sequence[GangEvent]:
        return ()

    def give_up(self, node: Node) -> None: ...

    def offer(self) -> Node | None:
        return None  # agents come by themselves

    def release(self) -> None: ...
