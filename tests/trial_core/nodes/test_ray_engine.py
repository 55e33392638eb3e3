"""Nodes of a real Ray cluster on this machine, with a stand-in for their agents."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import alive, kill, wait_until_gone
from tests.support.ray import ROOT, TOKEN, RayCluster, started_ray_cluster
from tests.support.waiting import until
from trial_core.errors import LaunchError
from trial_core.nodes import ray_connection, ray_engine
from trial_core.nodes.engine import NodeRequest
from trial_core.nodes.ray_engine import Machine, RayEngine, RayGang, divide

pytestmark = pytest.mark.ray

AGENT = "tests.support.stand_in_ray_agent"
DRIVER = ROOT / "tests" / "support" / "scripts" / "ray_driver.py"
SECONDS = 120.0


def never() -> bool:
    return False


def place(cluster: RayCluster, request: NodeRequest, seconds: float = SECONDS) -> RayGang:
    return RayEngine(cluster.address, agent_module=AGENT).place(request, seconds, never)


def got(folder: Path, count: int) -> list[dict[str, Any]]:
    """What so many stand-ins have written."""
    files = until(lambda: len(found := [*folder.glob("*.json")]) >= count and found, "agents")
    return [json.loads(each.read_text()) for each in files]


def placement_groups() -> list[str]:
    """The states of the placement groups that there still are."""
    import ray

    table = ray.util.placement_group_table()
    return [each["state"] for each in table.values() if each["state"] != "REMOVED"]


@pytest.fixture
def admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares the time of asking the cluster whether it needs a token; other tests do that."""
    monkeypatch.setattr(ray_engine, "check_admission", lambda *_: None)


@pytest.fixture
def connected(ray_cluster: RayCluster) -> Iterator[None]:
    """This process is connected already, as a flow that uses Ray itself."""
    import ray

    on_sigterm = signal.getsignal(signal.SIGTERM)  # `ray.init` sets another handler
    ray.init(ray_cluster.address, log_to_driver=False)
    yield
    ray.shutdown()
    signal.signal(signal.SIGTERM, on_sigterm)


def test_agents_run_on_different_nodes_and_end_with_the_gang(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    """Each gets the token by standard input, which no process list shows, and its own raylet."""
    on_sigterm = signal.getsignal(signal.SIGTERM)
    gang = place(ray_cluster, NodeRequest(slots=3))
    try:
        assert [node.slots for node in gang.nodes] == [2, 1]
        assert len({node.name for node in gang.nodes}) == 2
        for node in gang.nodes:
            gang.start(node, [str(tmp_path)], "the token of the run")
        agents = got(tmp_path, 2)
        assert {each["token"] for each in agents} == {"the token of the run"}
        assert {int(each["raylet"]) for each in agents} == set(ray_cluster.raylets.values())
        assert all("the token of the run" not in " ".join(each["command"]) for each in agents)
        # Each rank gets its share of the cores, not the whole that Ray gives the actor.
        assert {each["threads"] for each in agents} == {None}
        assert not gang.ended()
        assert signal.getsignal(signal.SIGTERM) == on_sigterm
    finally:
        gang.release()
    assert not wait_until_gone([each["pid"] for each in agents], 60)
    gang.release()


@pytest.mark.usefixtures("admitted", "connected")
def test_an_end_is_told_once_with_exit_code_and_last_lines(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    """The node is then free for another agent, and at the end no placement group is left."""
    gang = place(ray_cluster, NodeRequest(slots=4))
    try:
        first, second = gang.nodes
        gang.start(first, [str(tmp_path), "7"], "a token")
        gang.start(second, [str(tmp_path)], "a token")
        (end,) = until(gang.ended, "the agent's end")
        assert end.node == first.name
        assert end.why == "the agent has ended with exit code 7\nthe stand-in has its token"
        assert not gang.ended()
        other = gang.replace(first, SECONDS, never)
        assert other is not None
        assert other.slots == first.slots
        assert other.name not in {first.name, second.name}
        assert {*gang.nodes} == {second, other}
        gang.start(other, [str(tmp_path)], "a token")
        assert len(got(tmp_path, 3)) == 3
    finally:
        gang.release()
    until(lambda: not placement_groups(), "no placement group", instead=placement_groups)


@pytest.mark.usefixtures("admitted", "connected")
def test_a_request_that_finds_no_place_is_refused_and_leaves_nothing(
    ray_cluster: RayCluster,
) -> None:
    """At once if there never will be a place; else after the time, or when it is given up."""
    with pytest.raises(
        LaunchError, match=r"can never place 1 node with 3 CPU: .* has 2 CPU, 0 GPU"
    ):
        place(ray_cluster, NodeRequest(slots=3, slots_per_node=3))
    with pytest.raises(LaunchError, match=r"can never place 2 nodes with 2 CPU and 1 node with 1"):
        place(ray_cluster, NodeRequest(slots=5))
    gang = place(ray_cluster, NodeRequest(slots=4))
    try:
        with pytest.raises(LaunchError, match=r"not placed 1 node with 1 CPU: it took longer than"):
            place(ray_cluster, NodeRequest(slots=1), seconds=0.5)
        engine = RayEngine(ray_cluster.address)
        with pytest.raises(LaunchError, match="it was given up"):
            engine.place(NodeRequest(slots=1), SECONDS, lambda: True)
        assert placement_groups() == ["CREATED"]
        assert len(gang.nodes) == 2
    finally:
        gang.release()


@pytest.mark.usefixtures("admitted", "connected")
def test_a_killed_actor_is_told_and_leaves_no_agent(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    """As by the kernel, when memory is out. The raylet, which would end the agent, stands still."""
    gang = place(ray_cluster, NodeRequest(slots=2))
    try:
        gang.start(gang.nodes[0], [str(tmp_path)], "a token")
        (agent,) = got(tmp_path, 1)
        raylet = int(agent["raylet"])
        os.kill(raylet, signal.SIGSTOP)
        try:
            kill([agent["actor"]])
            assert not wait_until_gone([agent["pid"]], 5)
        finally:
            os.kill(raylet, signal.SIGCONT)
        (end,) = until(gang.ended, "the agent's end")
        assert end.why.startswith("Ray has lost the agent: ")
        assert "process has died" in end.why
    finally:
        gang.release()


def test_a_killed_driver_leaves_no_agent(ray_cluster: RayCluster, tmp_path: Path) -> None:
    """SIGKILL of the flow's process."""
    driver = subprocess.Popen(
        [sys.executable, str(DRIVER), ray_cluster.address, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        pids = [each["pid"] for each in got(tmp_path, 2)]
        assert alive(pids) == pids
    finally:
        kill([driver.pid])
        driver.wait()
    assert not wait_until_gone(pids, 60)


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LaunchError, match=r'pip install "trialflow\[ray\]"'):
        RayEngine().place(NodeRequest(slots=2), SECONDS, never)


UNEQUAL = [Machine("small", 16, 4), Machine("big", 32, 8), Machine("head", 4, 0)]


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (NodeRequest(slots=8), [(8, 8)]),
        (NodeRequest(slots=6), [(6, 6)]),
        (NodeRequest(slots=12), [(8, 8), (4, 4)]),
        (NodeRequest(slots=9, slots_per_node=4), [(4, 4), (4, 4), (1, 1)]),
        (NodeRequest(slots=5, on_cpu=True), [(2, 0), (2, 0), (1, 0)]),
    ],
)
def test_nodes_have_as_many_slots_as_the_largest_machine_has_gpus(
    request_: NodeRequest, expected: list[tuple[int, int]]
) -> None:
    bundles = divide(request_, UNEQUAL)
    assert [(each["CPU"], each.get("GPU", 0)) for each in bundles] == expected


def test_a_place_for_all_slots_together_is_not_enough() -> None:
    """Twelve GPUs are there, but not on two machines with the same number."""
    with pytest.raises(LaunchError, match=r"2 nodes with 6 CPU, 6 GPU: small has 16 CPU, 4 GPU;"):
        divide(NodeRequest(slots=12, slots_per_node=6), UNEQUAL)


@pytest.mark.long
def test_a_killed_raylet_is_told_and_its_node_is_replaced(tmp_path: Path) -> None:
    """By the only spare machine, while the other node's agent stays as it is."""
    with started_ray_cluster(0, 2, 2) as cluster, pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        gang = place(cluster, NodeRequest(slots=4))
        try:
            for node in gang.nodes:
                gang.start(node, [str(tmp_path)], "a token")
            first, second = got(tmp_path, 2)
            os.kill(int(second["raylet"]), signal.SIGKILL)
            assert not wait_until_gone([second["pid"]], 60)
            (end,) = until(gang.ended, "the node's end")
            assert re.search(r"raylet, process \d+ on .*, has ended|node has died", end.why)
            lost = next(node for node in gang.nodes if node.name == end.node)
            assert gang.replace(lost, 1.0, never) is None
            assert len(gang.nodes) == 1
            spare = cluster.add(2)
            other = gang.replace(lost, SECONDS, never)
            assert other is not None
            gang.start(other, [str(tmp_path)], "a token")
            third = next(each for each in got(tmp_path, 3) if each not in (first, second))
            assert int(third["raylet"]) == cluster.raylets[spare]
            assert alive([first["pid"]])
        finally:
            gang.release()
        assert not wait_until_gone([first["pid"], third["pid"]], 60)


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
                place(cluster, NodeRequest(slots=2))
        driver = subprocess.Popen(
            [sys.executable, str(DRIVER), cluster.address, str(tmp_path), "insecure"],
            env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"},
        )
        try:
            assert len(got(tmp_path, 2)) == 2
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
        place(ray_cluster, NodeRequest(slots=2))
    monkeypatch.setattr(ray_connection, "CONNECT_SECONDS", 8.0)
    with pytest.raises(LaunchError, match=r'no connection to a Ray cluster at "127.0.0.1:9": '):
        RayEngine("127.0.0.1:9").place(NodeRequest(slots=2), SECONDS, never)


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
        engine = RayEngine(f"ray://127.0.0.1:{port}", agent_module=AGENT)
        gang = engine.place(NodeRequest(slots=2), SECONDS, never)
        try:
            (node,) = gang.nodes
            gang.start(node, [str(tmp_path), "3"], "a token")
            (end,) = until(gang.ended, "the agent's end")
            assert "exit code 3" in end.why
            other = gang.replace(node, SECONDS, never)
            assert other is not None
            gang.start(other, [str(tmp_path)], "a token")
            pids = [each["pid"] for each in got(tmp_path, 2)]
        finally:
            gang.release()
        assert not wait_until_gone(pids, 60)
        patch.setenv("RAY_AUTH_TOKEN", "of-another-ray-cluster")
        with pytest.raises(LaunchError, match="refuses this process"):
            engine.place(NodeRequest(slots=2), SECONDS, never)
