"""The nodes of a run over all its launches: a provider finds them, and their agents join the hub.

A node that is lost or drains is replaced before the next launch. With a range of slots, the run may
also continue without it. The other nodes keep their agents, with the interpreters that have
imported PyTorch, the code, and the files of the last checkpoint.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

from trial_core.common.text_format import plural
from trial_core.errors import LaunchError, Stopped
from trial_core.processes.nodes.hub import ConnectedAgent, Hub
from trial_core.processes.nodes.node_messages import Leave
from trial_core.processes.nodes.node_provider import (
    AGENT_MODULE,
    Gang,
    Node,
    NodeDraining,
    NodeProvider,
    NodeRequest,
)
from trial_core.processes.slots.announcer import AnnouncementTimer

POLL_SECONDS = 0.2

WATCH_SECONDS = 0.5
"""How often to ask the provider while ranks train."""

OFFER_SECONDS = 30.0
"""How long no offer is taken after a node has not joined: the next may be the same machine.

The time doubles after each further failure before a launch, up to `MAX_OFFER_SECONDS`.
"""
MAX_OFFER_SECONDS = 3600.0

_logger = logging.getLogger(__name__)


class NodePool(AbstractContextManager["NodePool"]):
    """Keeps as many nodes as a run needs. A context manager: its end gives them back.

    One thread uses it, and the thread of `watching`.

    Args:
        max_wait_seconds: how long to wait for nodes, before the first launch and after a loss.
        replace_seconds: how long to wait for more nodes than the run needs.
        agent_arguments: of `AGENT_MODULE`, in addition to the pool's own.
    """

    def __init__(
        self,
        provider: NodeProvider,
        hub: Hub,
        request: NodeRequest,
        token: str,
        max_wait_seconds: float,
        replace_seconds: float = 0.0,
        agent_arguments: tuple[str, ...] = (),
    ) -> None:
        self._provider = provider
        self._hub = hub
        self._request = request
        self._token = token
        self._max_wait_seconds = max_wait_seconds
        self._replace_seconds = replace_seconds
        self._agent_arguments = agent_arguments
        self._gang: Gang | None = None
        self._members: list[ConnectedAgent] = []
        self._chosen: list[ConnectedAgent] = []
        self._trained_on: list[ConnectedAgent] = []
        self._has_launched = False
        self._gone: dict[str, str] = {}
        self._may_leave: dict[str, str] = {}
        self._unsuitable: set[int] = set()
        self._last_problem = ""
        self._takes_offers_from = 0.0
        self._offer_seconds = OFFER_SECONDS

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

        A node of an earlier call keeps its place among them. Lost ones are replaced. At first, a
        node that does not join ends the wait if there are too few others: the next would probably
        fare the same. Later, when the others may have trained for days, the run waits for another.

        Raises LaunchError if too few nodes came in time, or at first one cannot join; and Stopped
        if `should_abort` returned True.
        """
        began = time.monotonic()
        # Not for nodes that have just been there, all of them, or for a number that was left out.
        waits_for_more = not self._chosen or not all(map(self._is_there, self._chosen))
        self._chosen = []  # no ranks run: draining nodes may be left
        self._offer_seconds, self._takes_offers_from = OFFER_SECONDS, began
        self._last_problem = ""
        enough_since, enough = began, 0
        timer = AnnouncementTimer("waiting for nodes", began)
        if self._gang is None:
            on_activity(f"waiting for nodes of {self._provider.name}: {self._what_is_missing()}")
            gang = self._gang = self._provider.acquire(
                self._request, self._max_wait_seconds, should_abort
            )
            for node in list(gang.nodes):
                self._start(gang, node)
        while True:
            if should_abort():
                raise Stopped("the run was stopped while it waited for its nodes")
            problems = self._follow_provider(self._gang)
            self._take_ready()
            chosen, now = self._suitable(self._members), time.monotonic()
            has_enough = self._slots_to_come(self._gang) >= self._request.min_slots
            if problems and not (self._has_launched or has_enough):
                raise LaunchError(problems[0])
            self._note_problems(problems)
            if self.slots_of(chosen) != enough:  # others may follow the node that has come
                enough_since, enough = now, self.slots_of(chosen)
            has_all = enough == self._request.slots
            has_waited = not waits_for_more or now >= enough_since + self._replace_seconds
            if chosen and (has_all or has_waited):
                self._chosen, self._has_launched = chosen, True
                return list(chosen)
            if now > began + self._max_wait_seconds and not chosen:
                raise LaunchError(self._too_few())
            if timer.due(None, now) is not None:
                on_activity(f"waiting for nodes: {self._what_is_missing()}")
            with self._hub.changed:
                self._hub.changed.wait(POLL_SECONDS)

    def slots_of(self, agents: list[ConnectedAgent]) -> int:
        """How many ranks to launch on these nodes."""
        return min(sum(agent.slots for agent in agents), self._request.slots)

    def can_leave_out(self, slots: int) -> bool:
        """Return whether there are nodes for fewer ranks than this."""
        return bool(self._suitable(self._members, {*self._unsuitable, slots}))

    def leave_out(self, slots: int) -> None:
        """Never again offer this number of ranks, with which the trial cannot be trained."""
        self._unsuitable.add(slots)

    def has_trained(self) -> None:
        """Note that the ranks of the last launch have trained a batch."""
        self._trained_on = list(self._chosen)

    def can_retreat(self) -> bool:
        """Return whether there are nodes that `retreat` would leave, and enough without them."""
        return bool(self._new()) and bool(self._proven())

    def retreat(self, why: str) -> None:
        """Leave the nodes that were taken after the last launch that has trained, for good.

        From now on the run has no more slots than the nodes that are left, so that it takes no
        others in addition. Does nothing if there are too few of them by now.
        """
        suitable = self._proven()
        if not suitable:
            _logger.warning(
                "the nodes that have trained are lost meanwhile: no node is left: %s", why
            )
            return
        for agent in self._new():
            self._leave(agent, why)
        self._request = replace(self._request, slots=self.slots_of(suitable))
        self._chosen = suitable

    def _new(self) -> list[ConnectedAgent]:
        return [agent for agent in self._chosen if agent not in self._trained_on]

    def _proven(self) -> list[ConnectedAgent]:
        return self._suitable([agent for agent in self._members if agent in self._trained_on])

    def leave(self, name: str, why: str) -> None:
        """Leave a node for good, if it was taken after the last launch that has trained.

        Another one may be taken in its place.
        """
        for agent in self._new():
            if agent.name == name:
                self._leave(agent, why)

    def _leave(self, agent: ConnectedAgent, why: str) -> None:
        _logger.warning("the run continues without node %s: %s", agent.name, why)
        agent.draining = agent.draining or why  # so it leaves when the next nodes are gathered

    @contextmanager
    def watching(
        self, on_draining: Callable[[str], None], on_offer: Callable[[str], None]
    ) -> Iterator[None]:
        """Follow the nodes during the block, in which ranks train.

        Calls `on_draining` once, in another thread, when a node will be taken away and the ranks
        should save and end; and likewise `on_offer`, when there are nodes for more ranks.
        """
        if (gang := self._gang) is None:
            raise LaunchError("the nodes are watched before they were gathered")
        has_ended = threading.Event()

        def watch() -> None:
            is_offered = is_leaving = has_failed = False
            while not has_ended.wait(WATCH_SECONDS):
                try:
                    self._note_problems(self._follow_provider(gang))
                except Exception:
                    # Of the provider's library. Training continues, and agents are still heard.
                    if not has_failed:
                        _logger.exception("%s cannot be asked about its nodes", self._provider.name)
                    has_failed = True
                for agent in self._chosen:
                    if agent.name in self._gone:
                        agent.give_up(self._gone[agent.name])
                leaving = [f"{a.name} ({a.draining})" for a in self._chosen if a.draining]
                if leaving and not is_leaving:
                    is_leaving = True
                    on_draining(f"node {', '.join(leaving)} will be taken away")
                more = self._slots_offered()
                if more > self.slots_of(self._chosen) and not is_offered:
                    is_offered = True
                    on_offer(f"there are nodes for {plural(more, 'slot')}")

        thread = threading.Thread(target=watch, name="node-pool")
        thread.start()
        try:
            yield
        finally:
            has_ended.set()
            thread.join()

    def _slots_offered(self) -> int:
        """How many ranks the next launch may have, if no more nodes come."""
        members = list(self._members)
        self._take_ready()
        more, self._members = self.slots_of(self._suitable(self._members)), members
        return more

    @property
    def slots_left(self) -> int:
        """The number of ranks for which the last launch's remaining nodes have room."""
        return self.slots_of([agent for agent in self._chosen if self._is_there(agent)])

    def joined(self) -> list[ConnectedAgent]:
        """The agents of the present nodes, even if `gather` found them too few."""
        return [agent for agent in self._hub.agents.values() if self._is_there(agent)]

    # ----------------------------------------------------------------------------- the provider

    def _start(self, gang: Gang, node: Node) -> None:
        arguments = (
            "-m", AGENT_MODULE, "--driver", self._hub.address,
            "--node", node.name, "--slots", str(node.slots), *self._agent_arguments,
        )  # fmt: skip
        gang.start(node, arguments, self._token)

    def _follow_provider(self, gang: Gang) -> list[str]:
        """Give lost and draining nodes back, and take the provider's offers in their place.

        Returns why nodes have not joined.
        """
        problems = self._give_up_rejected(gang)
        for event in gang.events():
            if isinstance(event, NodeDraining):
                self._note_draining(event)
            else:
                self._gone.setdefault(event.node, event.why)
        self._let_leave()
        for node in list(gang.nodes):
            agent = self._hub.agents.get(node.name)
            if agent is not None and agent.lost is not None:
                self._gone.setdefault(node.name, agent.lost)
            if (why := self._gone.get(node.name)) is None:
                continue
            if agent is not None and agent in self._chosen and agent.lost is None:
                continue  # its ranks still run: see `watching` and `_let_leave`
            if agent is not None:
                agent.send(Leave())  # it may live, where the provider takes the node back
            gang.give_up(node)
            if agent is None:
                problems.append(f"the agent of node {node.name} has not joined: {why}")
            elif not agent.draining:
                _logger.warning("node %s is lost: %s", node.name, why)
        draining = {agent.name for agent in self._hub.agents.values() if agent.draining}
        leaving = draining | self._may_leave.keys()
        kept = sum(node.slots for node in gang.nodes if node.name not in leaving)
        takes_offers = not problems and time.monotonic() >= self._takes_offers_from
        is_short = kept < self._request.slots and takes_offers
        if is_short and (offered := gang.offer()) is not None:
            _logger.info("%s offers node %s", self._provider.name, offered.name)
            self._start(gang, offered)
        return problems

    def _give_up_rejected(self, gang: Gang) -> list[str]:
        """Give back nodes that the hub has refused, and return which, and why."""
        problems = []
        for name, why in self._hub.take_rejected():
            problems.append(f"node {name} is refused: {why}")
            for node in [node for node in gang.nodes if node.name == name]:
                if name not in self._hub.agents:  # else a second agent of a node was refused
                    self._gone[name] = why
                    gang.give_up(node)
        return problems

    def _note_problems(self, problems: list[str]) -> None:
        """Log the nodes that have not joined, and take no others for some time."""
        for problem in problems:
            _logger.warning("%s", problem)
            self._last_problem = problem
        if problems:
            self._takes_offers_from = time.monotonic() + self._offer_seconds
            self._offer_seconds = min(2 * self._offer_seconds, MAX_OFFER_SECONDS)

    def _note_draining(self, event: NodeDraining) -> None:
        agent = self._hub.agents.get(event.node)
        if event.can_stay:
            self._may_leave[event.node] = event.why
            _logger.warning("%s: the run leaves it when there are other nodes", event.why)
        elif agent is not None:
            agent.draining = agent.draining or event.why

    def _let_leave(self) -> None:
        """Let agents of draining nodes go if their ranks have ended, or they have none."""
        for name, why in list(self._may_leave.items()):
            agent = self._hub.agents.get(name)
            others = [a for a in self._hub.agents.values() if a is not agent and self._is_there(a)]
            can_do_without = sum(other.slots for other in others) >= self._request.min_slots
            if agent is not None and can_do_without:
                agent.draining = why
                del self._may_leave[name]
        for agent in self._hub.agents.values():
            is_idle = agent not in self._chosen and agent.name not in self._gone
            if agent.draining and agent.lost is None and is_idle:
                self._gone[agent.name] = agent.draining
                _logger.info("node %s has left the run: %s", agent.name, agent.draining)
                agent.send(Leave())

    # ------------------------------------------------------------------------------ the agents

    def _take_ready(self) -> None:
        """Give free places, and the places of lost nodes, to agents that have none."""
        spare = [
            agent
            for agent in self._hub.agents.values()
            if self._is_there(agent) and agent not in self._members
        ]
        for place, agent in enumerate(self._members):
            if not self._is_there(agent) and spare:
                self._members[place] = spare.pop(0)
        missing = self._request.slots - sum(a.slots for a in self._members if self._is_there(a))
        while spare and missing > 0:
            missing -= spare[0].slots
            self._members.append(spare.pop(0))

    def _suitable(
        self, agents: list[ConnectedAgent], unsuitable: set[int] | None = None
    ) -> list[ConnectedAgent]:
        """The first of these agents for as many ranks as possible, but for unsuitable numbers.

        Empty if they have too few slots.
        """
        unsuitable = self._unsuitable if unsuitable is None else unsuitable
        there = [agent for agent in agents if self._is_there(agent)]
        while there and self.slots_of(there[:-1]) == self.slots_of(there):
            there.pop()  # a smaller node may have taken a place
        while there and self.slots_of(there) in unsuitable:
            there.pop()
        return there if self.slots_of(there) >= self._request.min_slots else []

    def _slots_to_come(self, gang: Gang) -> int:
        """The slots of nodes that have joined, or whose agents may still do so."""
        agents = self._hub.agents
        starting = sum(node.slots for node in gang.nodes if node.name not in agents)
        return starting + sum(agent.slots for agent in agents.values() if self._is_there(agent))

    def _is_there(self, agent: ConnectedAgent) -> bool:
        return agent.lost is None and not agent.draining and agent.name not in self._gone

    # ----------------------------------------------------------------------------- for people

    def _what_is_missing(self) -> str:
        there = [agent for agent in self._members if self._is_there(agent)]
        request = self._request
        least = f" (at least {request.min_slots})" if request.min_slots < request.slots else ""
        return (
            f"{plural(len(there), 'node')} with {sum(agent.slots for agent in there)} of "
            f"{request.slots} slots{least} there"
        )

    def _too_few(self) -> str:
        lost = [
            f"{agent.name} ({self._gone.get(agent.name) or agent.lost or agent.draining})"
            for agent in self._members
            if not self._is_there(agent)
        ]
        after = f"; in place of {', '.join(lost)} came no other" if lost else ""
        if self._last_problem:
            after += f"; {self._last_problem}"
        return (
            f"not enough nodes of {self._provider.name} within {self._max_wait_seconds:g} s: "
            f"{self._what_is_missing()}{after}; start more, or reduce resources.slots_per_trial "
            "(the wait: resources.max_wait_seconds)"
        )
