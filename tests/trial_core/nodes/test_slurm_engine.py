"""The engine slurm, with a real Slurm of three nodes on this machine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.processes import alive, wait_until_gone
from tests.support.slurm import Slurm
from tests.support.waiting import until
from trial_core.errors import LaunchError
from trial_core.nodes import slurm_engine
from trial_core.nodes.engine import AgentEnded, Gang, NodeRequest
from trial_core.nodes.slurm_engine import SlurmEngine

STAND_IN = "tests.support.stand_in_slurm_agent"
SECONDS = 60.0
ROOT = Path(__file__).parents[3]

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.timeout(300)]


def never() -> bool:
    return False


def placed(environment: dict[str, str], request: NodeRequest) -> Gang:
    return SlurmEngine(environment, STAND_IN).place(request, SECONDS, never)


def told(path: Path, gang: Gang | None = None) -> dict[str, Any]:
    """What a stand-in has written; waits for it. If none is started, the failure says why."""
    until(path.exists, f"{path.name} is written", SECONDS, lambda: gang and gang.ended())
    read: dict[str, Any] = json.loads(path.read_text())
    return read


def one_ended(gang: Gang) -> AgentEnded:
    """The first agent that has ended; waits for it."""
    found = until(gang.ended, "an agent has ended")
    assert len(found) == 1
    ended: AgentEnded = found[0]
    return ended


@pytest.fixture
def allocation(slurm: Slurm) -> Iterator[dict[str, str]]:
    """Three nodes."""
    with slurm.allocation("--nodes=3", "--exclusive") as environment:
        yield environment


def test_agents_get_arguments_and_token_and_release_ends_them(
    slurm: Slurm, allocation: dict[str, str], tmp_path: Path
) -> None:
    """One on each node, with all its CPUs; other processes cannot see the token. An agent that
    ignores SIGTERM ends, too, and no step is left."""
    gang = placed(allocation, NodeRequest(slots=4, on_cpu=True))
    assert [(node.name, node.slots) for node in gang.nodes] == [("node1", 2), ("node2", 2)]
    for node in gang.nodes:
        gang.start(node, [str(tmp_path / node.name), "--an", "a b"], "s3cret-t0ken")
    agents = [told(tmp_path / node.name, gang) for node in gang.nodes]
    for agent, node in zip(agents, gang.nodes, strict=True):
        assert agent["node"] == node.name
        assert agent["arguments"] == ["--an", "a b"]
        assert agent["token"].strip() == "s3cret-t0ken"
        assert agent["cpus"] == "4"
        assert agent["folder"] == str(Path.cwd())
    assert not [
        process.info
        for process in psutil.process_iter(["cmdline", "environ"])
        if "s3cret-t0ken" in str(process.info)
    ]
    assert gang.ended() == []
    gang.release()
    gang.release()
    assert wait_until_gone([agent["pid"] for agent in agents], SECONDS) == []
    until(lambda: not slurm.steps(allocation), "no step is left")


def test_a_request_that_is_too_large_starts_nothing(
    slurm: Slurm, allocation: dict[str, str]
) -> None:
    """The error says what was asked for, and what each node has."""
    with pytest.raises(LaunchError, match=r"8 slots.*have 6 \(node1: 2, node2: 2, node3: 2\)"):
        placed(allocation, NodeRequest(slots=8, on_cpu=True))
    assert slurm.steps(allocation) == []


def test_an_agent_that_ends_is_told_once(allocation: dict[str, str], tmp_path: Path) -> None:
    """With its exit code and its last words. The nodes have GPUs, but the job none."""
    gang = placed(allocation, NodeRequest(slots=4))
    try:
        first, second = gang.nodes
        gang.start(first, [str(tmp_path / "first")], "token")
        gang.start(second, [str(tmp_path / "second"), "exit", "7"], "token")
        ended = one_ended(gang)
        assert ended.node == "node2"
        assert "exit code 7" in ended.why
        assert "these are the last words" in ended.why
        assert gang.ended() == []
        new = gang.replace(second, SECONDS, never)
        assert new is not None
        assert new.name.startswith("node3")  # node2 is well, but its agent has ended
    finally:
        gang.release()


def test_a_node_that_is_down_is_told_and_replaced(
    slurm: Slurm, allocation: dict[str, str], tmp_path: Path
) -> None:
    """Its agent has ended, the other one has not; the spare node takes its place."""
    gang = placed(allocation, NodeRequest(slots=4, on_cpu=True))
    try:
        for node in gang.nodes:
            gang.start(node, [str(tmp_path / node.name)], "token")
        pids = {node.name: told(tmp_path / node.name, gang)["pid"] for node in gang.nodes}
        slurm.command("scontrol", "update", "nodename=node2", "state=down", "reason=test")
        ended = one_ended(gang)
        assert ended.node == "node2"
        first, lost = gang.nodes
        new = gang.replace(lost, SECONDS, never)
        assert new is not None
        assert new.name.startswith("node3")
        assert list(gang.nodes) == [first, new]
        gang.start(new, [str(tmp_path / "new")], "token")
        assert told(tmp_path / "new", gang)["node"] == "node3"
        assert alive([pids["node1"]])
    finally:
        gang.release()


def test_a_slurmctld_that_does_not_answer_ends_no_agent(
    allocation: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agents run on; there is no replacement meanwhile."""
    environment = {**allocation, "PATH": f"{tmp_path}:{allocation['PATH']}"}
    gang = placed(environment, NodeRequest(slots=4, on_cpu=True))
    try:
        for node in gang.nodes:
            gang.start(node, [str(tmp_path / node.name)], "token")
            told(tmp_path / node.name, gang)
        monkeypatch.setattr(slurm_engine, "QUERY_SECONDS", 0.0)
        monkeypatch.setattr(slurm_engine, "ANSWER_SECONDS", 0.1)
        scontrol = tmp_path / "scontrol"
        for program in ("sleep 60", "echo slurm_load_node error >&2; exit 1"):
            scontrol.write_text(f"#!/bin/sh\n{program}\n")
            scontrol.chmod(0o755)
            assert gang.ended() == []
        assert gang.replace(gang.nodes[1], 0.0, never) is None
        with pytest.raises(LaunchError, match="slurm_load_node error"):
            SlurmEngine(environment, STAND_IN).place(NodeRequest(slots=4), 0.0, never)
    finally:
        gang.release()


def test_a_killed_driver_leaves_no_agent(
    slurm: Slurm, allocation: dict[str, str], tmp_path: Path
) -> None:
    """Slurm ends the agents: they do not notice by themselves, and ignore SIGTERM."""
    program = (
        "import sys, time\n"
        "from trial_core.nodes.engine import NodeRequest\n"
        "from trial_core.nodes.slurm_engine import SlurmEngine\n"
        f"engine = SlurmEngine(agent_module={STAND_IN!r})\n"
        "gang = engine.place(NodeRequest(slots=4, on_cpu=True), 60, lambda: False)\n"
        "for node in gang.nodes:\n"
        "    gang.start(node, [sys.argv[1] + '/' + node.name], 'token')\n"
        "time.sleep(600)\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], env=allocation)
    agents = [told(tmp_path / name)["pid"] for name in ("node1", "node2")]
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert wait_until_gone(agents, SECONDS) == []
    until(lambda: not slurm.steps(allocation), "no step is left")


def test_outside_of_an_allocation_the_error_says_how_to_get_one() -> None:
    """It names the commands and the script."""
    with pytest.raises(
        LaunchError, match=r"SLURM_JOB_ID is not set.*sbatch or salloc.*train\.sbatch"
    ):
        placed({}, NodeRequest(slots=1))


@pytest.mark.long
def test_unequal_nodes_give_as_many_slots_as_gpus(slurm: Slurm, tmp_path: Path) -> None:
    """Of three GPUs on two nodes; a step has all of its node."""
    with slurm.allocation("--nodes=2", "--gpus=3", "--cpus-per-gpu=1") as environment:
        with pytest.raises(LaunchError, match=r"4 slots.*have 3 \(node\d: \d of \d GPUs?, "):
            placed(environment, NodeRequest(slots=4))
        gang = placed(environment, NodeRequest(slots=3))
        try:
            assert sorted(node.slots for node in gang.nodes) == [1, 2]
            for node in gang.nodes:
                gang.start(node, [str(tmp_path / node.name)], "token")
                assert told(tmp_path / node.name, gang)["gpus"] == str(node.slots)
        finally:
            gang.release()
        one_each = placed(environment, NodeRequest(slots=2, slots_per_node=1))
        assert [node.slots for node in one_each.nodes] == [1, 1]
        with pytest.raises(LaunchError, match="3 slots"):  # only one node has two
            placed(environment, NodeRequest(slots=3, slots_per_node=2))


@pytest.mark.long
def test_a_node_whose_slurmd_dies_is_told_and_not_taken_again(
    slurm: Slurm, allocation: dict[str, str], tmp_path: Path
) -> None:
    """Slurm does not see it at once; until it is well there is no replacement."""
    gang = placed(allocation, NodeRequest(slots=6, on_cpu=True))
    try:
        for node in gang.nodes:
            gang.start(node, [str(tmp_path / node.name)], "token")
            told(tmp_path / node.name, gang)
        slurm.kill_node("node2")
        ended = one_ended(gang)
        assert ended.node == "node2"
        assert "node2 is ALLOCATED+NOT_RESPONDING" in ended.why
        lost = next(node for node in gang.nodes if node.name == "node2")
        assert gang.replace(lost, 0.0, never) is None
    finally:
        gang.release()
        slurm.start_node("node2")


@pytest.mark.long
def test_without_a_spare_a_killed_agent_returns_to_its_node(
    allocation: dict[str, str], tmp_path: Path
) -> None:
    """Slurm says that the node is well; its next agent has another name."""
    gang = placed(allocation, NodeRequest(slots=6, on_cpu=True))
    try:
        node = gang.nodes[1]
        gang.start(node, [str(tmp_path / "first")], "token")
        psutil.Process(told(tmp_path / "first", gang)["pid"]).kill()
        assert "exit code 137" in one_ended(gang).why
        new = gang.replace(node, SECONDS, never)
        assert new is not None
        assert new.name.startswith("node2#")
        gang.start(new, [str(tmp_path / "second")], "token")
        assert told(tmp_path / "second", gang)["node"] == "node2"
    finally:
        gang.release()


@pytest.mark.long
def test_two_runs_share_the_nodes_of_an_allocation(
    allocation: dict[str, str], tmp_path: Path
) -> None:
    """Neither waits for the steps of the other, nor ends them."""
    gangs = [placed(allocation, NodeRequest(slots=2, on_cpu=True)) for _ in range(2)]
    try:
        for number, gang in enumerate(gangs):
            gang.start(gang.nodes[0], [str(tmp_path / str(number))], "token")
        agents = [told(tmp_path / str(number), gang) for number, gang in enumerate(gangs)]
        assert [(agent["node"], agent["cpus"]) for agent in agents] == [("node1", "4")] * 2
        gangs[0].release()
        assert wait_until_gone([agents[0]["pid"]], SECONDS) == []
        assert alive([agents[1]["pid"]])
    finally:
        for gang in gangs:
            gang.release()


@pytest.mark.long
def test_a_drained_node_is_not_chosen(slurm: Slurm, allocation: dict[str, str]) -> None:
    """The next one takes its place."""
    slurm.command("scontrol", "update", "nodename=node1", "state=drain", "reason=test")
    gang = placed(allocation, NodeRequest(slots=4, on_cpu=True))
    assert [node.name for node in gang.nodes] == ["node2", "node3"]
    with pytest.raises(LaunchError, match=r"node1: ALLOCATED\+DRAIN"):
        placed(allocation, NodeRequest(slots=6, on_cpu=True))


TRIALFLOW = """#!/bin/bash
echo "$SLURM_RESTART_COUNT $*" >> started
trap 'echo saved >> started; exit 130' TERM
while [ -z "$SLURM_RESTART_COUNT" ]; do sleep 0.1; done
"""
"""Trains until SIGTERM; when Slurm has queued the job again, it has nothing left to do."""


@pytest.mark.long
def test_the_batch_script_saves_and_continues_the_same_trial(slurm: Slurm, tmp_path: Path) -> None:
    """SIGTERM to the script, as before the time limit, reaches trialflow. When that has saved, the
    job is queued again, and its next start has the same command."""
    slurm.wait_until_idle()
    (tmp_path / "trialflow").write_text(TRIALFLOW)
    (tmp_path / "trialflow").chmod(0o755)
    started = tmp_path / "started"
    job = slurm.command(
        "sbatch", "--parsable", f"--chdir={tmp_path}", "--gpus-per-node=1",
        f"--export=ALL,PATH={tmp_path}:/usr/bin:/bin",
        str(ROOT / "deployments" / "slurm" / "train.sbatch"),
    ).strip()  # fmt: skip
    try:
        until(started.exists, "trialflow is started")
        slurm.command("scancel", "--batch", "--signal=TERM", job)
        until(lambda: started.read_text().count("\n") == 3, "it is started again")
        command = f"train experiment.yaml --engine slurm --set name=gpt-{job} --resume --take-over"
        assert started.read_text().splitlines() == [f" {command}", "saved", f"1 {command}"]
        until(lambda: not slurm.command("squeue", "-h"), "the job has ended")
        assert "ExitCode=0:0" in slurm.command("scontrol", "show", "job", job)
    finally:
        if slurm.command("squeue", "-h"):
            slurm.command("scancel", job)
