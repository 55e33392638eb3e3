"""The engine slurm, with a real Slurm of three nodes on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.engines import ROOT, SECONDS, STAND_IN, told
from tests.support.processes import wait_until_gone
from tests.support.slurm import Slurm
from tests.support.waiting import until
from trial_core.errors import LaunchError
from trial_core.nodes import slurm_engine
from trial_core.nodes.engine import Gang, NodeRequest
from trial_core.nodes.slurm_engine import SlurmEngine

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.timeout(300)]


def never() -> bool:
    return False


def place(environment: dict[str, str], request: NodeRequest) -> Gang:
    return SlurmEngine(environment, STAND_IN).place(request, SECONDS, never)


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
    gang = place(allocation, NodeRequest(4, 4, on_cpu=True))
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
    assert gang.events() == []
    gang.release()
    gang.release()
    assert wait_until_gone([agent["pid"] for agent in agents], SECONDS) == []
    until(lambda: not slurm.steps(allocation), "no step is left")


def test_a_request_that_is_too_large_starts_nothing(
    slurm: Slurm, allocation: dict[str, str]
) -> None:
    """The error says what was asked for, and what each node has."""
    with pytest.raises(LaunchError, match=r"8 slots.*have 6 \(node1: 2, node2: 2, node3: 2\)"):
        place(allocation, NodeRequest(8, 8, on_cpu=True))
    assert slurm.steps(allocation) == []


def test_a_slurmctld_that_does_not_answer_ends_no_agent(
    allocation: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agents run on; there is no replacement meanwhile."""
    environment = {**allocation, "PATH": f"{tmp_path}:{allocation['PATH']}"}
    gang = place(environment, NodeRequest(4, 4, on_cpu=True))
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
            assert gang.events() == []
        gang.give_up(gang.nodes[1])
        assert gang.offer() is None
        with pytest.raises(LaunchError, match="slurm_load_node error"):
            SlurmEngine(environment, STAND_IN).place(NodeRequest(4, 4), 0.0, never)
    finally:
        gang.release()


def test_outside_of_an_allocation_the_error_says_how_to_get_one() -> None:
    """It names the commands and the script."""
    with pytest.raises(
        LaunchError, match=r"SLURM_JOB_ID is not set.*sbatch or salloc.*train\.sbatch"
    ):
        place({}, NodeRequest(1, 1))


@pytest.mark.long
def test_unequal_nodes_give_as_many_slots_as_gpus(slurm: Slurm, tmp_path: Path) -> None:
    """Of three GPUs on two nodes; a step has all of its node."""
    with slurm.allocation("--nodes=2", "--gpus=3", "--cpus-per-gpu=1") as environment:
        with pytest.raises(LaunchError, match=r"4 slots.*have 3 \(node\d: \d of \d GPUs?, "):
            place(environment, NodeRequest(4, 4))
        gang = place(environment, NodeRequest(3, 3))
        try:
            assert sorted(node.slots for node in gang.nodes) == [1, 2]
            for node in gang.nodes:
                gang.start(node, [str(tmp_path / node.name)], "token")
                assert told(tmp_path / node.name, gang)["gpus"] == str(node.slots)
        finally:
            gang.release()
        one_each = place(environment, NodeRequest(2, 2, slots_per_node=1))
        assert [node.slots for node in one_each.nodes] == [1, 1]
        with pytest.raises(LaunchError, match="3 slots"):  # only one node has two
            place(environment, NodeRequest(3, 3, slots_per_node=2))


@pytest.mark.long
def test_a_node_whose_slurmd_dies_is_told_and_not_taken_again(
    slurm: Slurm, allocation: dict[str, str], tmp_path: Path
) -> None:
    """Slurm does not see it at once; until it is well there is no replacement."""
    gang = place(allocation, NodeRequest(6, 6, on_cpu=True))
    try:
        for node in gang.nodes:
            gang.start(node, [str(tmp_path / node.name)], "token")
            told(tmp_path / node.name, gang)
        slurm.kill_node("node2")
        (ended,) = until(gang.events, "the node's end")
        assert ended.node == "node2"
        assert "node2 is ALLOCATED+NOT_RESPONDING" in ended.why
        gang.give_up(next(node for node in gang.nodes if node.name == "node2"))
        assert gang.offer() is None
    finally:
        gang.release()
        slurm.start_node("node2")


@pytest.mark.long
def test_a_drained_node_is_not_chosen(slurm: Slurm, allocation: dict[str, str]) -> None:
    """The next one takes its place."""
    slurm.drain_node("node1")
    gang = place(allocation, NodeRequest(4, 4, on_cpu=True))
    assert [node.name for node in gang.nodes] == ["node2", "node3"]
    with pytest.raises(LaunchError, match=r"node1: ALLOCATED\+DRAIN"):
        place(allocation, NodeRequest(6, 6, on_cpu=True))


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
    started = tmp_path / "started"
    with submitted_script(slurm, tmp_path) as job:
        until(started.exists, "trialflow is started")
        slurm.command("scancel", "--batch", "--signal=TERM", job)
        until(lambda: started.read_text().count("\n") == 3, "it is started again")
        command = f"train experiment.yaml --engine slurm --set name=gpt-{job} --resume --take-over"
        assert started.read_text().splitlines() == [f" {command}", "saved", f"1 {command}"]
        until(lambda: not slurm.command("squeue", "-h"), "the job has ended")
        assert "ExitCode=0:0" in slurm.command("scontrol", "show", "job", job)


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "state"),
    [(("--batch", "--signal=INT"), "FAILED"), ((), "CANCELLED")],
    ids=["SIGINT", "scancel"],
)
def test_a_job_that_was_ended_is_not_queued_again(
    slurm: Slurm, tmp_path: Path, how: tuple[str, ...], state: str
) -> None:
    """It saves first by SIGINT. A plain scancel sends the script SIGTERM, as a time limit does."""
    started = tmp_path / "started"
    with submitted_script(slurm, tmp_path) as job:
        until(started.exists, "trialflow is started")
        slurm.command("scancel", *how, job)
        until(lambda: not slurm.command("squeue", "-h"), "the job has ended")
        assert started.read_text().splitlines()[1:] == ["saved"]
        shown = slurm.command("scontrol", "show", "job", job)
        assert f"JobState={state} " in shown
        assert "Restarts=0" in shown


@contextmanager
def submitted_script(slurm: Slurm, folder: Path) -> Iterator[str]:
    """A job of the batch script, with a stand-in for trialflow."""
    slurm.wait_until_idle()
    (folder / "trialflow").write_text(TRIALFLOW)
    (folder / "trialflow").chmod(0o755)
    job = slurm.command(
        "sbatch", "--parsable", f"--chdir={folder}", "--gpus-per-node=1",
        f"--export=ALL,PATH={folder}:/usr/bin:/bin",
        str(ROOT / "deployments" / "slurm" / "train.sbatch"),
    ).strip()  # fmt: skip
    try:
        yield job
    finally:
        if slurm.command("squeue", "-h"):
            slurm.command("scancel", job)
