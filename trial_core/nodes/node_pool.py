"""The nodes of a run, over all its launches: an engine finds them, and their agents join the hub.

A node that is lost is replaced before the next launch. The other nodes keep their agents, with the
interpreters that have imported PyTorch, the code, and the files of the last checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from trial_core.errors import LaunchError, Stopped
from trial_core.nodes.engine import Engine, Gang, Node, NodeRequest
from trial_core.nodes.hub import ConnectedAgent, Hub
from trial_core.nodes.node_messages import Leave
from trial_core.slots.announcer import Pace
from trial_core.text_format import plural

POLL_SECONDS = 0.2

_logger = logging.getLogger(__name__)


class NodePool:
    """Keeps as many nodes as a run needs. A context manager: at its end they are given back.

    Args:
        engine: finds the nodes.
        hub: which their agents join.
        request: what the run needs.
        token: that of the hub.
        max_wait_seconds: how long to wait for nodes, before the first launch and after a loss.
        agent_arguments: of `AGENT_MODULE`, besides those that the pool gives it.
    """

    def __init__(
        self,
        engine: Engine,
        hub: Hub,
        request: NodeRequest,
        token: str,
        max_wait_seconds: float,
        agent_arguments: tuple[str, ...] = (),
    ) -> None:
        self._engine = engine
        self._hub = hub
        self._request = request
        self._token = token
        self._max_wait_seconds = max_wait_seconds
        self._agent_arguments = agent_arguments
        self._gang: Gang | None = None
        self._members: list[ConnectedAgent] = []
        self._ended: dict[str, str] = {}

    def __enter__(self) -> NodePool:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._hub.close()  # first: agents that get word of the end are not killed
        finally:
            if self._gang is not None:
                self._gang.release()

    def gather(
        self,
        should_abort: Callable[[], bool] = lambda: False,
        on_activity: Callable[[str], None] = lambda text: None,
    ) -> list[ConnectedAgent]:
        """Wait until there are as many nodes as the run needs, and return their agents.

        A node that was there before keeps its place among them. Lost ones are replaced.

        Args:
            should_abort: asked meanwhile whether to give up.
            on_activity: told now and then what is missing.

        Raises:
            LaunchError: there are too few nodes in time; or a node cannot train.
            Stopped: `should_abort` returned True.
        """
        deadline = time.monotonic() + self._max_wait_seconds
        pace = Pace("waiting for nodes", time.monotonic())
        if self._gang is None:
            on_activity(f"waiting for nodes of {self._engine.name}: {self._what_is_missing()}")
            gang = self._gang = self._engine.place(
                self._request, self._max_wait_seconds, should_abort
            )
            for node in list(gang.nodes):
                self._start(gang, node)
        while True:
            if should_abort():
                raise Stopped("the run was stopped while it waited for its nodes")
            self._replace_lost(self._gang, deadline, should_abort)
            self._take_ready()
            if self._slots() >= self._request.slots:
                for why in self._hub.take_rejected():
                    _logger.warning("%s", why)
                return list(self._members)
            if rejected := self._hub.take_rejected():
                raise LaunchError(rejected[0])
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"not enough nodes within {self._max_wait_seconds:g} s: "
                    f"{self._what_is_missing()}; start more, or reduce resources.slots_per_trial "
                    "(the wait: resources.max_wait_seconds)"
                )
            if pace.due(None, time.monotonic()) is not None:
                on_activity(f"waiting for nodes: {self._what_is_missing()}")
            with self._hub.changed:
                self._hub.changed.wait(POLL_SECONDS)

    def _start(self, gang: Gang, node: Node) -> None:
        arguments = (
            "--driver", self._hub.address, "--node", node.name, "--slots", str(node.slots),
            *self._agent_arguments,
        )  # fmt: skip
        gang.start(node, arguments, self._token)

    def _replace_lost(self, gang: Gang, deadline: float, should_abort: Callable[[], bool]) -> None:
        """Replace the engine's nodes whose agents are gone."""
        self._ended.update({each.node: each.why for each in gang.ended()})
        for node in list(gang.nodes):
            agent = self._hub.agents.get(node.name)
            why = self._ended.get(node.name) or (agent.lost if agent is not None else None)
            if why is None:
                continue
            self._ended[node.name] = why
            if agent is not None:
                agent.send(Leave())  # it may live, where the engine takes the node back
            if agent is None:  # it has never joined: another node would probably fare the same
                raise LaunchError(f"the agent of node {node.name} has not joined: {why}")
            _logger.warning("node %s is lost (%s): waiting for another one", node.name, why)
            new = gang.replace(node, max(0.0, deadline - time.monotonic()), should_abort)
            if should_abort():
                raise Stopped("the run was stopped while it waited for a node")
            if new is None:
                raise LaunchError(
                    f"{self._engine.name} has no other node with {plural(node.slots, 'slot')} in "
                    f"place of {node.name}, which is lost ({why}), within "
                    f"{self._max_wait_seconds:g} s (resources.max_wait_seconds)"
                )
            self._start(gang, new)

    def _take_ready(self) -> None:
        """Give the places of lost nodes, and those that are free, to agents that have none."""
        spare = [
            agent
            for agent in self._hub.agents.values()
            if self._is_there(agent) and agent not in self._members
        ]
        for place, agent in enumerate(self._members):
            if not self._is_there(agent) and spare:
                self._members[place] = spare.pop(0)
        while spare and self._slots() < self._request.slots:
            self._members.append(spare.pop(0))
        if self._slots() >= self._request.slots:  # a smaller node may have taken a place
            self._members = self._first_with(self._request.slots)

    def _first_with(self, slots: int) -> list[ConnectedAgent]:
        """The first members that together have as many slots, without lost ones."""
        chosen: list[ConnectedAgent] = []
        for agent in self._members:
            if sum(each.slots for each in chosen) >= slots:
                break
            if self._is_there(agent):
                chosen.append(agent)
        return chosen

    def _is_there(self, agent: ConnectedAgent) -> bool:
        return agent.lost is None and agent.name not in self._ended

    def _slots(self) -> int:
        return sum(agent.slots for agent in self._members if self._is_there(agent))

    def _what_is_missing(self) -> str:
        there = [agent for agent in self._members if self._is_there(agent)]
        return (
            f"{plural(len(there), 'node')} with {self._slots()} of {self._request.slots} slots "
            "there"
        )
