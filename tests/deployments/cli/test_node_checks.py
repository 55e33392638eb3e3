"""`trialflow doctor --engine`: what it finds on each node, and what differs."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import trialflow, write_experiment
from tests.support.hosts import DRIVER, new_hosts, run
from tests.support.json_types import check_json
from tests.support.nodes import LOOPBACK, Agents, FakeAgent, fake_agent, hub
from tests.support.prefect import isolated
from tests.support.ray import RayCluster
from tests.support.slurm import Slurm
from tests.support.waiting import until
from trial_core.checkpoint.store import CheckpointStore
from trial_core.processes.nodes.examination import installed_packages
from trial_core.processes.nodes.join_token import new_token, write_token
from trial_core.processes.nodes.node_messages import (
    Examine,
    Examined,
    ListeningNode,
    NodeReady,
    Reach,
    Reached,
    StorageTried,
    TryStorage,
    Welcome,
    own_versions,
)
from trialflow.deployments.cli.doctor import nodes
from trialflow.deployments.cli.experiment_options import RunChanges
from trialflow.deployments.cli.node_checks import (
    ANSWER_SECONDS,
    ask,
    differences,
    slow_nodes,
    storage_checks,
)

END_SECONDS = 60.0
AHEAD_SECONDS = 100.0


def experiment_on_nodes(folder: Path, address: str = LOOPBACK, **fields: Any) -> tuple[Path, str]:
    """An experiment of two slots on two nodes, and where its driver will listen."""
    with socket.socket() as free:
        free.bind((address, 0))
        port = free.getsockname()[1]
    channel = {"bind": address, "ports": port, "token_file": str(folder / "token")}
    resources = {"slots_per_trial": 2, "slots_per_node": 1, "channel": channel, **fields}
    path = write_experiment(
        folder, resources=resources, checkpoint_storage=f"file://{folder}/checkpoints"
    )
    return path, f"tls://{address}:{port}"


def doctor(
    folder: Path, *arguments: str, variables: Mapping[str, str] | None = None
) -> tuple[int, list[dict[str, str]]]:
    """The exit code and the checks of nodes of `trialflow doctor`."""
    here = {"PREFECT_API_URL": "", **isolated(folder / "prefect"), **(variables or {})}
    done = trialflow(folder, "doctor", "--json", *arguments, variables=here)
    assert done.stdout, done.stderr
    checks = check_json(json.loads(done.stdout))["checks"]
    subjects = [check["subject"] for check in checks]
    return done.returncode, checks[subjects.index("server") + 1 :]


def of_nodes(checks: list[dict[str, str]], subject: str) -> dict[str, str]:
    """The status of a subject on each node."""
    return {each["node"]: each["status"] for each in checks if each["subject"] == subject}


def assert_complete(checks: list[dict[str, str]], names: set[str]) -> None:
    """Every check was made on every node; only the machine's speed and size may be a warning."""
    for subject in ("node", "clock", "network"):
        assert of_nodes(checks, subject) == dict.fromkeys(names, "ok"), checks
    for subject in ("storage", "/dev/shm", "disk"):
        assert of_nodes(checks, subject).keys() == names, checks
    for subject in ("nodes", "versions", "packages"):
        assert of_nodes(checks, subject) == {"": "ok"}, checks


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    """Starts agents, which end with the test."""
    with Agents(tmp_path / "nodes") as started:
        yield started


@pytest.mark.long
def test_every_node_is_examined(tmp_path: Path, agents: Agents) -> None:
    """Nothing stays in the storage, and the nodes are told that they are not needed any more."""
    _, address = experiment_on_nodes(tmp_path)
    token = write_token(tmp_path / "token")
    for name in ("a", "b"):
        agents.start(address, token, "--node", name, "--preload", "none")
    code, checks = doctor(tmp_path, "--engine", "join")
    assert code == 0, checks
    assert_complete(checks, {"a", "b"})
    assert [agent.wait(END_SECONDS) for agent in agents.started] == [0, 0]
    assert [path for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()] == []


def test_what_differs_is_named(
    tmp_path: Path, agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With both nodes: versions, packages, a clock, a node that cannot be reached, a lost one."""
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))
    path, address = experiment_on_nodes(tmp_path)
    token = write_token(tmp_path / "token")
    agents.start(address, token, "--node", "good", "--preload", "none")
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(lambda: [*nodes(path, RunChanges(engine="join"))])
        other = joined(address, token, node="bad", versions={**own_versions(), "torch": "1.0"})
        try:
            port = answer_wrongly(other)
        finally:
            other.close()
        checks = found.result()
    text = "\n".join(map(str, checks))
    torch = re.escape(own_versions()["torch"])
    bad = rf"bad \(over there, {LOOPBACK}\)"
    good = rf"good \({socket.gethostname()}, {LOOPBACK}\)"
    for expected in (
        rf"fail  versions     torch 1\.0 on bad, {torch} on good: install the same versions",
        r"warn  packages     numpy 0\.1 on bad, \S+ on good: install the same ones",
        r"warn  clock        bad: (9\d|10\d)\.\d+ s ahead of this machine's",
        rf"fail  network      good: {good} cannot connect to {bad}, port {port}: .*refused: ranks",
        rf"fail  network      bad: {bad} cannot connect to {good}, port \d+: a wall: ranks talk to",
        r"fail  storage      bad: the node is lost: its agent has closed the connection",
        r"ok    clock        good: ",
        r"ok    storage      good: ",
    ):
        assert re.search(f"^{expected}", text, re.MULTILINE), (expected, text)


def joined(address: str, token: str, **hello: Any) -> FakeAgent:
    """An agent of this process that has joined the driver, once that listens."""
    host, _, port = address.removeprefix("tls://").partition(":")

    def listens() -> bool:
        with socket.socket() as connection:
            return connection.connect_ex((host, int(port))) == 0

    until(listens, "the driver listens")
    return FakeAgent(address, token, host="over there", **hello)


def examined(**fields: Any) -> Examined:
    """The answer of a node without anything, but for the given fields."""
    nothing: dict[str, Any] = {
        "received_at": 0.0, "answered_at": 0.0, "packages": {}, "cores": 1, "accelerators": "",
        "accelerator_problem": None, "operator_problem": None, "shared_memory": None, "folder": "/",
        "disk_free_bytes": 0, "listening": "",
    }  # fmt: skip
    return Examined(**{**nothing, **fields})


def answer_wrongly(agent: FakeAgent) -> int:
    """Be a node with another numpy and clock, behind a wall, that is lost before the last answer.

    Returns:
        The port on which it does not listen.
    """
    assert isinstance(agent.next(), Welcome)
    agent.say(NodeReady(slots=1, address=LOOPBACK))
    assert isinstance(agent.next(), Examine)
    now = time.time() + AHEAD_SECONDS
    with socket.create_server((LOOPBACK, 0)) as closed:
        port = int(closed.getsockname()[1])
    packages = {**installed_packages(), "numpy": "0.1"}
    listening = ListeningNode(LOOPBACK, port, "closed")
    agent.say(examined(received_at=now, answered_at=now, packages=packages, listening=listening))
    question = agent.next()
    assert isinstance(question, Reach)
    assert question.nodes["good"] != question.nodes["bad"]
    agent.say(Reached(problems={"good": "a wall"}))
    agent.next()
    return port


@pytest.mark.parametrize(
    ("hello", "expected"),
    [
        ({"versions": {**own_versions(), "trialflow": "0"}}, "is refused: it has trialflow 0 inst"),
        ({}, "cannot train: there is no such network"),
    ],
    ids=["another trialflow", "cannot train"],
)
def test_a_node_that_cannot_be_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hello: dict[str, Any], expected: str
) -> None:
    """It is a failed check that names the node."""
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))
    path, address = experiment_on_nodes(tmp_path)
    token = write_token(tmp_path / "token")
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(lambda: [*nodes(path, RunChanges(engine="join"))])
        agent = joined(address, token, node="bad", **hello)
        try:
            if isinstance(agent.next(), Welcome):
                agent.say(NodeReady(problem="there is no such network"))
            (check,) = found.result()
        finally:
            agent.close()
    assert str(check).startswith("fail  nodes        node bad ")
    assert expected in str(check)


def test_a_slow_storage_and_other_accelerators() -> None:
    """A node is slow beside a faster one, not if all are; and the ranks wait for it."""
    fast, slow, idle = (StorageTried(read_seconds=s, write_seconds=1.0) for s in (0.1, 1.0, 0.05))
    assert slow_nodes({"a": fast, "b": slow}) == {"b": "a"}
    assert slow_nodes({"a": slow, "b": slow}) == {}
    assert slow_nodes({"a": fast, "b": idle}) == {}
    found = {
        "a": examined(accelerators="8 × cuda (H100)"),
        "b": examined(accelerators=""),
        "c": examined(accelerators="8 × cuda (H100)"),
    }
    (check, packages) = differences(found)
    assert (check.subject, check.status) == ("accelerators", "warn")
    assert check.found == "8 × cuda (H100) on a, c, none on b"
    assert packages.status == "ok"


def test_what_a_lost_node_has_written_is_deleted(tmp_path: Path) -> None:
    """The driver deletes it with its own object."""
    storage = CheckpointStore(f"file://{tmp_path}/storage").storage
    token = new_token()
    with hub(token=token) as opened, fake_agent(opened, token) as fake:
        with opened.changed:
            opened.changed.wait_for(lambda: opened.agents)

        def write_and_leave() -> set[str]:
            question = fake.next()
            assert isinstance(question, TryStorage)
            storage.write(f"{question.folder}/mine", b"mine")
            written = {path.name for path in (tmp_path / "storage").rglob("*") if path.is_file()}
            fake.close()  # the driver deletes from here on
            return written

        with ThreadPoolExecutor(1) as thread:
            seen = thread.submit(write_and_leave)
            (check,) = storage_checks(storage, [*opened.agents.values()])
            assert seen.result() == {"of-the-driver", "mine"}
    assert (check.subject, check.status) == ("storage", "fail")
    assert "the node is lost: its agent has closed the connection" in check.found
    assert [path for path in (tmp_path / "storage").rglob("*") if path.is_file()] == []


def test_a_silent_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver does not wait for it without end."""
    monkeypatch.setitem(ANSWER_SECONDS, Examined, 0.1)
    token = new_token()
    with hub(token=token) as opened, fake_agent(opened, token):
        with opened.changed:
            opened.changed.wait_for(lambda: opened.agents)
        agents = [*opened.agents.values()]
        (check,) = ask("node", agents, Examine(environment={}), Examined)
    assert (check.status, check.found) == ("fail", "no answer within 0.1 s")


@pytest.mark.long
def test_without_an_experiment(tmp_path: Path) -> None:
    """There is nothing that would say how many nodes."""
    code, checks = doctor(tmp_path, "--engine", "ray")
    (check,) = checks
    assert (code, check["status"]) == (1, "fail")
    assert check["advice"] == "--config names the experiment whose nodes are meant"


@pytest.mark.long
def test_hosts_that_reach_the_driver_alone(tmp_path: Path) -> None:
    """Neither each other nor the driver's folder: each failure names both hosts, or the folder."""
    hidden = tmp_path / "driver"
    hidden.mkdir()
    with new_hosts(hidden) as hosts:
        _, address = experiment_on_nodes(hidden, DRIVER)
        token = write_token(hidden / "token")
        for number in (1, 2):
            name = hosts.add()
            run("ip", "link", "set", f"trialflow{number}", "type", "bridge_slave", "isolated", "on")
            hosts.start_agent(name, address, token, tmp_path / name)
        code, checks = doctor(hidden, "--engine", "join")
    assert code == 1
    names = of_nodes(checks, "clock").keys()
    assert len(names) == 2
    assert of_nodes(checks, "network") == dict.fromkeys(names, "fail")
    first, second = (each["found"] for each in checks if each["subject"] == "network")
    for found in (first, second):
        assert "10.77.0.11)" in found
        assert "10.77.0.12)" in found
    assert of_nodes(checks, "storage") == dict.fromkeys(names, "fail")
    seen = [each["found"] for each in checks if each["subject"] == "storage"]
    assert all("this node sees another storage than the driver" in each for each in seen)


@pytest.mark.long
def test_the_nodes_of_an_allocation(tmp_path: Path, slurm: Slurm) -> None:
    """`srun` starts the agents, and no step stays."""
    experiment_on_nodes(tmp_path, accelerator="cpu")
    with slurm.allocation("--nodes=2", "--exclusive") as environment:
        code, checks = doctor(tmp_path, "--engine", "slurm", variables=environment)
        assert slurm.steps(environment) == []
    assert code == 0, checks
    names = {*of_nodes(checks, "node")}
    assert len(names) == 2
    assert_complete(checks, names)


@pytest.mark.long
def test_the_nodes_of_a_ray_cluster(tmp_path: Path, ray_cluster: RayCluster) -> None:
    """Actors hold the agents."""
    experiment_on_nodes(tmp_path, accelerator="cpu", ray={"address": ray_cluster.address})
    code, checks = doctor(tmp_path, "--engine", "ray", variables=ray_cluster.environment)
    assert code == 0, checks
    names = {*of_nodes(checks, "node")}
    assert len(names) == 2
    assert_complete(checks, names)
