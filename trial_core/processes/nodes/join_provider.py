"""Nodes that join by hand: a person or another launcher runs `trialflow join` on each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trial_core.processes.nodes.node_provider import (
    Gang,
    GangEvent,
    Node,
    NodeProvider,
    NodeRequest,
)


class JoinProvider(NodeProvider):
    """Starts nothing and does not wait: agents join when they are started."""

    name = "join"

    def acquire(
        self, request: NodeRequest, seconds: float, should_abort: Callable[[], bool]
    ) -> Gang:
        return _NoGang()


class _NoGang(Gang):
    """A gang for nodes that no provider knows."""

    nodes: Sequence[Node] = ()

    def start(self, node: Node, arguments: Sequence[str], token: str) -> None:
        """Never called: the gang is empty."""

    def events(self) -> Sequence[GangEvent]:
        return ()

    def give_up(self, node: Node) -> None:
        """Never called: the gang is empty."""

    def offer(self) -> Node | None:
        return None  # agents come by themselves

    def release(self) -> None:
        """Nothing to give back."""
