"""The provider slurm, with a real Slurm of three nodes on this machine."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.node_clusters import ROOT, SECONDS, STAND_IN, told
from tests.support.processes import alive, wait_until_gone
from tests.support.slurm import Slurm
from tests.support.waiting import until
from trial_core.errors import LaunchError
from trial_core.processes.nodes import slurm_provider
from trial_core.processes.nodes.node_provider import Gang, GangEvent, Node, NodeRequest
from trial_core.processes.nodes.slurm_provider import SlurmProvider

pytestmark = [pytest.mark.xdist_group("slurm")]


def offered(gang: Any) -> Node | None:
    """What is offered when Slurm has answered."""
    question = gang._hosts_now

    def has_answered() -> bool:
        if question._asked is None:
            assert gang.offer() is None  # asks, if it is time
        return question._asked is not None and question._asked.done()

    until(has_answered, "Slurm has answered")
    node: Node | None = gang.offer()
    return node


def never() -> bool:
    return False


def acquire(environment: dict[str, str], request: NodeRequest) -> Gang:
    return SlurmProvider(environment).acquire(request, SECONDS, never)


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
    gang = acquire(allocation, NodeRequest(4, 4, on_cpu=True))
    assert [(node.name, node.slots) for node in gang.nodes] == [("node1", 2), ("node2", 2)]
    for node in gang.nodes:
        gang.start(node, [*STAND_IN, str(tmp_path / node.name), "--an", "a b"], "s3cret-t0ken")
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
        acquire(allocation, NodeRequest(8, 8, on_cpu=True))
    assert slurm.steps(allocation) == []


def test_a_slurmctld_that_does_not_answer_ends_no_agent(
    allocation: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agents run on; there is no replacement meanwhile."""
    monkeypatch.setattr(slurm_provider, "QUERY_SECONDS", 0.0)
    environment = {**allocation, "PATH": f"{tmp_path}:{allocation['PATH']}"}
    gang = acquire(environment, NodeRequest(4, 4, on_cpu=True))
    try:
        for node in gang.nodes:
            gang.start(node, [*STAND_IN, str(tmp_path / node.name)], "token")
            told(tmp_path / node.name, gang)
        monkeypatch.setattr(slurm_provider, "ANSWER_SECONDS", 0.1)
        scontrol, asked = tmp_path / "scontrol", tmp_path / "asked"
        events: list[GangEvent] = []
        for program in ("exec sleep 60", "echo slurm_load_node error >&2; exit 1"):
            scontrol.write_text(f"#!/bin/sh\necho >> {asked}\n{program}\n")
            scontrol.chmod(0o755)
            asked.write_text("")
            # When it asks for the third time, it has handled the first answer.
            until(lambda: events.extend(gang.events()) or asked.stat().st_size > 2, "it asks")
        assert events == []
        gang.give_up(gang.nodes[1])
        assert offered(gang) is None
        with pytest.raises(LaunchError, match="slurm_load_node error"):
            SlurmProvider(environment).acquire(NodeRequest(4, 4), 0.0, never)
    finally:
        gang.release()


SCONTROL = """#!/bin/sh
here=$(dirname "$0")
turns=0
while [ -e "$here/slow" ]; do
    sleep 0.05
    turns=$((turns + 1))
    if [ $turns = 200 ]; then touch "$here/was-waited-for"; exit 1; fi
done
case "$2" in
job) echo "JobId=7 NodeList=n[1-3] Nodes=n[1-3] CPU_IDs=0-3 Mem=0 GRES= NtasksPerN:B:S:C=0:0:*:*" ;;
hostnames) echo "n1 n2 n3" ;;
node) printf 'NodeName=%s Arch=x State=%s x\\n' n1 ALLOCATED n2 "$(cat "$here/state")" n3 IDLE ;;
esac
"""
"""Answers when there is no file ``slow``, and notes that it was waited for until it gave up."""

SRUN = """#!/bin/sh
here=$(dirname "$0")
trap 'until [ -e "$here/may-end" ] || [ ! -e "$here" ]; do sleep 0.05; done; exit 0' TERM
echo $$ >> "$here/steps"
while [ -e "$here" ]; do sleep 0.05; done
"""
"""A step that ends only when there is a file ``may-end``, or its folder is deleted."""


@pytest.fixture
def slow_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gang]:
    """Two of three nodes of a Slurm that may be slow, with their agents."""
    monkeypatch.setattr(slurm_provider, "QUERY_SECONDS", 0.0)
    monkeypatch.setattr(slurm_provider, "OFFER_SECONDS", 0.0)
    for name, program in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "state").write_text("ALLOCATED")
    environment = {"SLURM_JOB_ID": "7", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    gang = acquire(environment, NodeRequest(4, 4, on_cpu=True))
    for node in gang.nodes:
        gang.start(node, STAND_IN, "token")
    until(lambda: len(steps(tmp_path)) == 2, "the steps have started")
    yield gang
    (tmp_path / "slow").unlink(missing_ok=True)
    (tmp_path / "may-end").touch()
    gang.release()
    assert alive(steps(tmp_path)) == []


def steps(folder: Path) -> list[int]:
    """The processes of the steps that have begun."""
    with suppress(FileNotFoundError):
        return [int(line) for line in (folder / "steps").read_text().splitlines()]
    return []


def test_a_controller_that_takes_its_time_keeps_nothing_waiting(
    tmp_path: Path, slow_slurm: Gang
) -> None:
    """Who asks also has to notice that an agent must leave. What it says late still counts."""
    assert slurm_provider.ANSWER_SECONDS > 20.0  # twice what Slurm gives itself
    (tmp_path / "slow").touch()
    (tmp_path / "state").write_text("ALLOCATED+DRAIN")
    for _ in range(3):
        slow_slurm.events()
        assert slow_slurm.offer() is None
    (tmp_path / "slow").unlink()
    (drained,) = until(slow_slurm.events, "the drained node is told")
    assert (drained.node, drained.can_stay) == ("n2", True)
    third = until(slow_slurm.offer, "the third node is offered")
    assert third.name == "n3#1"
    assert not (tmp_path / "was-waited-for").exists()


def test_a_node_that_was_given_up_is_offered_when_its_agent_has_ended(
    tmp_path: Path, slow_slurm: Gang
) -> None:
    """Its end, which Slurm may not be able to cause at once, is not waited for."""
    second = slow_slurm.nodes[1]
    slow_slurm.give_up(second)
    assert len(alive(steps(tmp_path))) == 2
    assert until(slow_slurm.offer, "the third node is offered").name == "n3#1"
    assert offered(slow_slurm) is None
    (tmp_path / "may-end").touch()
    assert until(slow_slurm.offer, "the second node is offered").name == "n2#2"


def test_an_answer_is_not_used_when_it_is_old(
    slow_slurm: Gang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that has not looked for long asks again."""
    monkeypatch.setattr(slurm_provider, "FRESH_SECONDS", 0.0)
    assert offered(slow_slurm) is None
    monkeypatch.undo()
    assert until(slow_slurm.offer, "the third node is offered").name == "n3#1"


def test_what_was_asked_before_a_node_was_given_up_is_forgotten() -> None:
    """Otherwise the node might be offered again by its state of before."""
    question: slurm_provider._Question[str] = slurm_provider._Question(0.0)
    may_answer, has_answered = threading.Event(), threading.Event()

    def old() -> str:
        may_answer.wait(60)
        has_answered.set()
        return "old"

    assert question.answer(old) is None
    question.forget()
    may_answer.set()
    assert has_answered.wait(60)
    assert until(lambda: question.answer(lambda: "new"), "an answer") == "new"


def test_outside_of_an_allocation_the_error_says_how_to_get_one() -> None:
    """It names the commands and the script."""
    with pytest.raises(
        LaunchError, match=r"SLURM_JOB_ID is not set.*sbatch or salloc.*train\.sbatch"
    ):
        acquire({}, NodeRequest(1, 1))


@pytest.mark.long
def test_unequal_nodes_give_as_many_slots_as_gpus(slurm: Slurm, tmp_path: Path) -> None:
    """Of three GPUs on two nodes; a step has all of its node."""
    with slurm.allocation("--nodes=2", "--gpus=3", "--cpus-per-gpu=1") as environment:
        with pytest.raises(LaunchError, match=r"4 slots.*have 3 \(node\d: \d of \d GPUs?, "):
            acquire(environment, NodeRequest(4, 4))
        gang = acquire(environment, NodeRequest(3, 3))
        try:
            assert sorted(node.slots for node in gang.nodes) == [1, 2]
            for node in gang.nodes:
                gang.start(node, [*STAND_IN, str(tmp_path / node.name)], "token")
                assert told(tmp_path / node.name, gang)["gpus"] == str(node.slots)
        finally:
            gang.release()
        one_each = acquire(environment, NodeRequest(2, 2, slots_per_node=1))
        assert [node.slots for node in one_each.nodes] == [1, 1]
        with pytest.raises(LaunchError, match="3 slots"):  # only one node has two
            acquire(environment, NodeRequest(3, 3, slots_per_node=2))


@pytest.mark.long
def test_a_node_whose_slurmd_dies_is_told_and_not_taken_again(
    slurm: Slurm, allocation: dict[str, str], tmp_path: Path
) -> None:
    """Slurm does not see it at once; until it is well there is no replacement."""
    gang = acquire(allocation, NodeRequest(6, 6, on_cpu=True))
    try:
        for node in gang.nodes:
            gang.start(node, [*STAND_IN, str(tmp_path / node.name)], "token")
            told(tmp_path / node.name, gang)
        slurm.kill_node("node2")
        (ended,) = until(gang.events, "the node's end")
        assert ended.node == "node2"
        assert "node2 is ALLOCATED+NOT_RESPONDING" in ended.why
        gang.give_up(next(node for node in gang.nodes if node.name == "node2"))
        assert offered(gang) is None
    finally:
        gang.release()
        slurm.start_node("node2")


@pytest.mark.long
def test_a_drained_node_is_not_chosen(slurm: Slurm, allocation: dict[str, str]) -> None:
    """The next one takes its place."""
    slurm.drain_node("node1")
    gang = acquire(allocation, NodeRequest(4, 4, on_cpu=True))
    assert [node.name for node in gang.nodes] == ["node2", "node3"]
    with pytest.raises(LaunchError, match=r"node1: ALLOCATED\+DRAIN"):
        acquire(allocation, NodeRequest(6, 6, on_cpu=True))


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
