"""What every provider does, each with a real cluster on this machine.

`tests/flows/test_node_providers.py` has the same for whole runs.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.node_clusters import (
    DRIVER,
    ROOT,
    SECONDS,
    STAND_IN,
    NodeCluster,
    nodes_of_a_run,
    placed,
    told,
)
from tests.support.processes import alive, kill, wait_until_gone
from tests.support.waiting import until
from trial_core.errors import LaunchError
from trial_core.processes.nodes.hub import ConnectedAgent
from trial_core.processes.nodes.node_pool import NodePool
from trial_core.processes.nodes.node_provider import AgentEnded, NodeRequest


def two_nodes(pool: NodePool) -> tuple[ConnectedAgent, ConnectedAgent]:
    """The agents of a run that has two nodes with two slots each."""
    first, second = pool.gather()
    assert (first.slots, second.slots) == (2, 2)
    return first, second


def test_a_request_without_a_place_starts_nothing(cluster: NodeCluster) -> None:
    """The error says what was asked for and what there is. No node is kept for the request."""
    with (
        nodes_of_a_run(cluster, 64, seconds=2.0) as nodes,
        pytest.raises(LaunchError, match=cluster.refusal),
    ):
        nodes.gather()


def test_a_killed_agent_is_replaced(cluster: NodeCluster) -> None:
    """The provider starts another one on the same node. The other node's agent stays."""
    with nodes_of_a_run(cluster, 4) as nodes:
        first, second = two_nodes(nodes)
        kill([second.pid])
        until(lambda: second.lost, "the agent is lost")
        cluster.start_again()
        kept, new = two_nodes(nodes)
        assert kept is first
        assert new.name != second.name
        assert alive([first.pid]) == [first.pid]


@pytest.mark.long
def test_a_lost_node_is_replaced(cluster: NodeCluster) -> None:
    """By one that becomes available meanwhile. The other node's agent stays."""
    with nodes_of_a_run(cluster, 4) as nodes:
        first, second = two_nodes(nodes)
        machine = cluster.machine(second)
        lose(cluster, second, nodes)
        cluster.add()
        kept, new = two_nodes(nodes)
        assert kept is first
        assert machine not in {cluster.machine(first), cluster.machine(new)}


@pytest.mark.long
def test_a_draining_node_is_left(cluster: NodeCluster) -> None:
    """Its agent runs until the run has saved, and then leaves without a crash."""
    with nodes_of_a_run(cluster, 4) as nodes:
        first, second = two_nodes(nodes)
        told: queue.Queue[str] = queue.Queue()
        with nodes.watching(told.put, pytest.fail):
            cluster.drain(cluster.machine(second))
            cluster.add()
            assert f"node {second.name} (" in told.get(timeout=SECONDS)
            assert second.lost is None
        kept, new = two_nodes(nodes)
        assert kept is first
        assert new.name != second.name
        assert wait_until_gone([second.pid], SECONDS) == []


@pytest.mark.long
def test_a_run_shrinks_and_grows(cluster: NodeCluster) -> None:
    """With a range of slots: it does not wait for another node, and takes it later."""
    with nodes_of_a_run(cluster, 4, min_slots=2, replace_seconds=SECONDS) as nodes:
        first, second = two_nodes(nodes)
        lose(cluster, second, nodes)
        nodes._replace_seconds = 0.0
        assert nodes.gather() == [first]
        offers: queue.Queue[str] = queue.Queue()
        with nodes.watching(pytest.fail, offers.put):
            cluster.add()
            assert offers.get(timeout=SECONDS) == "there are nodes for 4 slots"
        assert two_nodes(nodes)[0] is first


@pytest.mark.long
def test_two_runs_share_nodes(starting_cluster: NodeCluster) -> None:
    """Neither waits for the other, nor ends its agents."""
    with nodes_of_a_run(starting_cluster, 2, slots_per_node=1) as nodes:
        ours = nodes.gather()
        with nodes_of_a_run(starting_cluster, 2, slots_per_node=1) as others:
            theirs = others.gather()
            assert [agent.slots for agent in [*ours, *theirs]] == [1, 1, 1, 1]
            assert on(starting_cluster, ours) == on(starting_cluster, theirs)
        assert nodes.gather() == ours
        assert len(alive(agent.pid for agent in ours)) == 2


def test_an_end_is_told_once(starting_cluster: NodeCluster, tmp_path: Path) -> None:
    """With the agent's exit code and its last words. Its machine is then offered as a new node."""
    gang = placed(starting_cluster, NodeRequest(4, 4, on_cpu=True))
    try:
        first, second = gang.nodes
        gang.start(first, [*STAND_IN, str(tmp_path / "first")], "a token")
        gang.start(second, [*STAND_IN, str(tmp_path / "second"), "exit", "7"], "a token")
        (end,) = until(gang.events, "the agent's end", SECONDS)
        assert isinstance(end, AgentEnded)
        assert end.node == second.name
        assert "exit code 7" in end.why
        assert "these are the last words" in end.why
        assert gang.events() == []
        gang.give_up(second)
        other = until(gang.offer, "a node is offered", SECONDS)
        assert other.slots == second.slots
        assert other.name not in {first.name, second.name}
        assert list(gang.nodes) == [first, other]
        gang.start(other, [*STAND_IN, str(tmp_path / "other")], "a token")
        pids = [told(tmp_path / name, gang)["pid"] for name in ("first", "other")]
        assert gang.offer() is None
    finally:
        gang.release()
    gang.release()
    assert wait_until_gone(pids, SECONDS) == []


def test_a_killed_driver_leaves_no_agent(starting_cluster: NodeCluster, tmp_path: Path) -> None:
    """The provider ends the agents: they do not notice by themselves, and ignore SIGTERM."""
    address = starting_cluster.resources().get("ray", {}).values()
    driver = subprocess.Popen(
        [sys.executable, str(DRIVER), str(tmp_path), *address],
        env={**os.environ, **starting_cluster.variables(), "PYTHONPATH": str(ROOT)},
    )
    try:
        pids = [told(tmp_path / name)["pid"] for name in ("agent-0", "agent-1")]
        assert alive(pids) == pids
    finally:
        kill([driver.pid])
        driver.wait()
    assert wait_until_gone(pids, SECONDS) == []


def lose(cluster: NodeCluster, agent: ConnectedAgent, nodes: NodePool) -> None:
    """Take a node away while ranks train, and wait until the run knows it."""
    with nodes.watching(pytest.fail, pytest.fail):
        cluster.lose(cluster.machine(agent))
        until(lambda: agent.lost, "the node is lost", SECONDS)


def on(cluster: NodeCluster, agents: list[ConnectedAgent]) -> set[str]:
    """The nodes of agents."""
    return {cluster.machine(agent) for agent in agents}
