"""Agents that join while another thread of the driver looks at those that have."""

from __future__ import annotations

import os

from trial_core.processes.nodes.hub import ConnectedAgent, Hub
from trial_core.processes.nodes.join_token import new_token
from trial_core.processes.nodes.node_messages import AgentHello, NodeReady
from trial_core.processes.slots.addresses import LOOPBACK_ADDRESS, ListenAddress


def test_an_agent_may_join_while_the_others_are_counted() -> None:
    """A thread that iterates over the hub's agents is not disturbed, and sees it the next time."""
    hello = AgentHello(node="late", host="here", pid=os.getpid(), slots=8, versions={})
    with Hub(ListenAddress(LOOPBACK_ADDRESS), new_token()) as hub:
        counted = iter(hub.agents.values())
        agent = ConnectedAgent("late", hello, lambda data: None, lambda: None)
        hub.admit(agent, NodeReady(slots=8))
        assert list(counted) == []
        assert [agent.slots for agent in hub.agents.values()] == [8]
