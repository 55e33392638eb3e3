"""Nodes that join by hand: a person, or another launcher, runs `trialflow join` on each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trial_core.nodes.node_provider import Gang, GangEvent, Node, NodeRequest


class JoinProvider:
    """Starts nothing and does not wait: agents join when they are started."""

    name = "join"

    def acquire(
        self, request: NodeRequest, seconds: float, should_abort: Callable[[], bool]
    ) -> Gang:
        """Part of `NodeProvider`."""
        return _NoGang()


class _NoGang:
    """Nodes of which no provider knows."""

    nodes: Sequence[Node] = ()

    def start(self, node: Node, arguments: Sequence[str], token: str) -> None:
        """Part of `Gang`. There is no node to call it for."""

    def events(self) -> Sequence[GangEvent]:
        """Part of `Gang`."""
        return ()

    def give_up(self, node: Node) -> None:
        """Part of `Gang`. There is no node to call it for."""

    def offer(self) -> Node | None:
        """Part of `Gang`. Agents come by themselves."""
        return None

    def release(self) -> None:
        """Part of `Gang`."""
