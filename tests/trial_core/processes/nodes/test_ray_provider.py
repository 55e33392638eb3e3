"""Nodes of a real Ray cluster on this machine, with a stand-in for their agents."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.node_clusters import DRIVER, ROOT, SECONDS, STAND_IN, placement_groups, told
from tests.support.processes import kill, wait_until_gone
from tests.support.ray import TOKEN, RayCluster, started_ray_cluster
from tests.support.waiting import until
from trial_core.errors import LaunchError
from trial_core.processes.nodes import ray_connection
from trial_core.processes.nodes.node_provider import Node, NodeDraining, NodeRequest
from trial_core.processes.nodes.ray_provider import Machine, RayGang, RayProvider, divide

pytestmark = pytest.mark.ray


def never() -> bool:
    return False


def acquire(cluster: RayCluster, request: NodeRequest, seconds: float = SECONDS) -> RayGang:
    return RayProvider(cluster.address).acquire(request, seconds, never)


@pytest.mark.long
def test_agents_run_on_different_nodes_and_end_with_the_gang(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    """Each gets the token by standard input, which no process list shows, and its own raylet."""
    on_sigterm = signal.getsignal(signal.SIGTERM)
    gang = acquire(ray_cluster, NodeRequest(3, 3))
    try:
        assert [node.slots for node in gang.nodes] == [2, 1]
        assert len({node.name for node in gang.nodes}) == 2
        for node in gang.nodes:
            gang.start(node, [*STAND_IN, str(tmp_path / node.name)], "the token of the run")
        agents = [told(tmp_path / node.name, gang) for node in gang.nodes]
        assert {each["token"] for each in agents} == {"the token of the run"}
        _, *raylets = ray_cluster.raylets.values()  # the head has no cores
        assert {int(each["raylet"]) for each in agents} == set(raylets)
        assert all("the token of the run" not in " ".join(each["command"]) for each in agents)
        # Each rank gets its share of the cores, not the whole that Ray gives the actor.
        assert {each["threads"] for each in agents} == {None}
        assert not gang.events()
        assert signal.getsignal(signal.SIGTERM) == on_sigterm
    finally:
        gang.release()
    assert not wait_until_gone([each["pid"] for each in agents], 60)
    gang.release()


@pytest.mark.long
@pytest.mark.usefixtures("admitted", "connected")
def test_a_request_that_finds_no_place_is_refused_and_leaves_nothing(
    ray_cluster: RayCluster,
) -> None:
    """At once if there never will be a place; else after the time, or when it is given up."""
    with pytest.raises(
        LaunchError, match=r"can never place 1 node with 3 CPU: .* has 2 CPU, 0 GPU"
    ):
        acquire(ray_cluster, NodeRequest(3, 3, slots_per_node=3))
    with pytest.raises(LaunchError, match=r"can never place 2 nodes with 2 CPU and 1 node with 1"):
        acquire(ray_cluster, NodeRequest(5, 5))
    gang = acquire(ray_cluster, NodeRequest(4, 4))
    try:
        with pytest.raises(LaunchError, match=r"not placed 1 node with 1 CPU: it took longer than"):
            acquire(ray_cluster, NodeRequest(1, 1), seconds=0.5)
        provider = RayProvider(ray_cluster.address)
        with pytest.raises(LaunchError, match="it was given up"):
            provider.acquire(NodeRequest(1, 1), SECONDS, lambda: True)
        assert placement_groups() == ["CREATED"]
        assert len(gang.nodes) == 2
    finally:
        gang.release()


@pytest.mark.long
@pytest.mark.usefixtures("admitted", "connected")
def test_a_killed_actor_is_told_and_leaves_no_agent(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    """As by the kernel, when memory is out. The raylet, which would end the agent, stands still."""
    gang = acquire(ray_cluster, NodeRequest(2, 2))
    try:
        gang.start(gang.nodes[0], [*STAND_IN, str(tmp_path / "agent")], "a token")
        agent = told(tmp_path / "agent", gang)
        raylet = int(agent["raylet"])
        os.kill(raylet, signal.SIGSTOP)
        try:
            kill([agent["parent"]])
            assert not wait_until_gone([agent["pid"]], 5)
        finally:
            os.kill(raylet, signal.SIGCONT)
        (end,) = until(gang.events, "the agent's end")
        assert end.why.startswith("Ray has lost the agent: ")
        assert "process has died" in end.why
    finally:
        gang.release()


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LaunchError, match=r'pip install "trialflow\[ray\]"'):
        RayProvider().acquire(NodeRequest(2, 2), SECONDS, never)


UNEQUAL = [Machine("small", 16, 4), Machine("big", 32, 8), Machine("head", 4, 0)]


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (NodeRequest(8, 8), [(8, 8)]),
        (NodeRequest(6, 6), [(6, 6)]),
        (NodeRequest(12, 12), [(8, 8), (4, 4)]),
        (NodeRequest(9, 9, slots_per_node=4), [(4, 4), (4, 4), (1, 1)]),
        (NodeRequest(5, 5, on_cpu=True), [(2, 0), (2, 0), (1, 0)]),
    ],
)
def test_nodes_have_as_many_slots_as_the_largest_machine_has_gpus(
    request_: NodeRequest, expected: list[tuple[int, int]]
) -> None:
    needed, more = divide(request_, UNEQUAL)
    assert [(each["CPU"], each.get("GPU", 0)) for each in needed] == expected
    assert more == []


def test_nodes_that_a_run_can_do_without_are_apart() -> None:
    """The cluster need not have room for them now."""
    needed, more = divide(NodeRequest(20, 3, slots_per_node=4), UNEQUAL)
    assert [each["GPU"] for each in needed] == [4]
    assert [each["GPU"] for each in more] == [4, 4, 4, 4]


def test_a_place_for_all_slots_together_is_not_enough() -> None:
    """Twelve GPUs are there, but not on two machines with the same number."""
    with pytest.raises(LaunchError, match=r"2 nodes with 6 CPU, 6 GPU: small has 16 CPU, 4 GPU;"):
        divide(NodeRequest(12, 12, slots_per_node=6), UNEQUAL)


@pytest.mark.long
def test_a_draining_machine_has_a_stand_in_until_it_is_dead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then Ray moves its bundle, and the gang offers that again, too. Ray itself prints nothing."""
    with started_ray_cluster(0, 2, 2) as cluster, pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        gang = acquire(cluster, NodeRequest(4, 4))
        try:
            _, second = gang.nodes
            drained = raylet_of(second, gang, tmp_path, cluster)
            cluster.drain(drained)
            assert until(gang.events, "the drain") == [
                NodeDraining(second.name, "Ray drains its machine")
            ]
            assert gang.events() == []
            assert gang.offer() is None
            spare = cluster.add(2)
            other = until(gang.offer, "the stand-in")
            assert raylet_of(other, gang, tmp_path, cluster) == spare
            gang.give_up(second)
            assert gang.offer() is None
            cluster.kill(drained)
            last = cluster.add(2)
            third = until(gang.offer, "the bundle of the dead machine")
            assert raylet_of(third, gang, tmp_path, cluster) == last
            cluster.kill(spare)
            (end,) = until(gang.events, "the node's end")
            assert end.node == other.name
            assert re.search(r"raylet, process \d+ on .*, has ended|node has died", end.why)
            assert capsys.readouterr().out == ""
        finally:
            gang.release()


def raylet_of(node: Node, gang: RayGang, folder: Path, cluster: RayCluster) -> str:
    """Ray's id of the machine on which the agent of a node is started."""
    gang.start(node, [*STAND_IN, str(folder / node.name)], "a token")
    raylet = int(told(folder / node.name, gang)["raylet"])
    return next(each for each, pid in cluster.raylets.items() if pid == raylet)


@pytest.mark.long
def test_a_cluster_that_admits_strangers_is_refused(tmp_path: Path) -> None:
    """Also if this client has a token; `is_insecure` permits it."""
    with started_ray_cluster(2, 2, mode="disabled") as cluster:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_AUTH_MODE", "token")
            patch.setenv("RAY_AUTH_TOKEN", TOKEN)
            with pytest.raises(
                LaunchError, match=r"admits clients without a token.*insecure: true"
            ):
                acquire(cluster, NodeRequest(2, 2))
        driver = subprocess.Popen(
            [sys.executable, str(DRIVER), str(tmp_path), cluster.address, "insecure"],
            env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"},
        )
        try:
            assert told(tmp_path / "agent-1")["token"] == "a token"
        finally:
            kill([driver.pid])
            driver.wait()


@pytest.mark.long
def test_a_wrong_token_and_a_missing_cluster_are_told(
    ray_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Soon: Ray itself would try for many minutes."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of-another-ray-cluster")
    with pytest.raises(LaunchError, match="refuses this process, which has no token or another"):
        acquire(ray_cluster, NodeRequest(2, 2))
    monkeypatch.setattr(ray_connection, "CONNECT_SECONDS", 8.0)
    with pytest.raises(LaunchError, match=r'no connection to a Ray cluster at "127.0.0.1:9": '):
        RayProvider("127.0.0.1:9").acquire(NodeRequest(2, 2), SECONDS, never)


@pytest.mark.long
def test_a_driver_outside_of_the_cluster(tmp_path: Path) -> None:
    """An address of Ray's client server, which refuses a wrong token."""
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    with (
        started_ray_cluster(2, client_port=port) as cluster,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        provider = RayProvider(f"ray://127.0.0.1:{port}")
        gang = provider.acquire(NodeRequest(2, 2), SECONDS, never)
        try:
            (node,) = gang.nodes
            gang.start(node, [*STAND_IN, str(tmp_path / "first"), "exit", "3"], "a token")
            (end,) = until(gang.events, "the agent's end")
            assert "exit code 3" in end.why
            gang.give_up(node)
            other = until(gang.offer, "a node is offered")
            gang.start(other, [*STAND_IN, str(tmp_path / "second")], "a token")
            pids = [told(tmp_path / "second", gang)["pid"]]
        finally:
            gang.release()
        assert not wait_until_gone(pids, 60)
        patch.setenv("RAY_AUTH_TOKEN", "of-another-ray-cluster")
        with pytest.raises(LaunchError, match="refuses this process"):
            provider.acquire(NodeRequest(2, 2), SECONDS, never)
