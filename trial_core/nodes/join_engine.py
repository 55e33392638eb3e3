"""Nodes that join by hand: a person, or another launcher, runs `trialflow join` on each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trial_core.nodes.engine import AgentEnded, Gang, Node, NodeRequest


class JoinEngine:
    """Starts nothing and does not wait: agents join when they are started."""

    name = "join"

    def place(self, request: NodeRequest, seconds: float, should_abort: Callable[[], bool]) -> Gang:
        """Part of `Engine`."""
        return _NoGang()


class _NoGang:
    """Nodes of which no engine knows."""

    nodes: Sequence[Node] = ()

    def start(self, node: Node, arguments: Sequence[str], token: str) -> None:
        """Part of `Gang`. There is no node to call it for."""

    def ended(self) -> Sequence[AgentEnded]:
        """Part of `Gang`."""
        return ()

    def replace(self, lost: Node, seconds: float, should_abort: Callable[[], bool]) -> Node | None:
        """Part of `Gang`. There is no node to call it for."""
        return None

    def release(self) -> None:
        """Part of `Gang`."""
