"""A run whose ranks are on several nodes: each is an agent here, with its own folder."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.flow import breaking, train
from tests.support.nodes import LOOPBACK, Agents, FakeAgent
from tests.support.slots import lines, toy_config
from tests.support.waiting import until
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import ConfigError
from trial_core.processes.nodes.join_token import write_token
from trial_core.processes.nodes.node_messages import (
    Leave,
    NodeReady,
    PrepareRanks,
    RanksPrepared,
    Welcome,
)
from trialflow.flows.evaluate import evaluate
from trialflow.flows.train import TrialResult

pytestmark = [pytest.mark.slots, pytest.mark.server]

END_SECONDS = 60.0


def on_nodes(here: Path, batches: int, **changes: Any) -> Any:
    """An experiment whose two ranks are on two nodes, saved every 4 batches."""
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1]
    resources = {
        "slots_per_trial": 2, "slots_per_node": 1, "engine": "join", "max_wait_seconds": 120,
        "channel": {"bind": LOOPBACK, "ports": port, "token_file": str(here / "token")},
    }  # fmt: skip
    fields: dict[str, Any] = {"scheduling_unit": 4, "min_checkpoint_period": {"batches": 4}}
    resources.update(changes.pop("resources", {}))
    return toy_config(here, batches, resources=resources, **{**fields, **changes})


def driver_of(config: Any) -> str:
    """Where the agents of a run reach its driver."""
    return f"tls://{LOOPBACK}:{config.resources.channel.ports}"


@pytest.fixture
def nodes(here: Path) -> Iterator[Callable[[Any, int], Agents]]:
    """Starts as many agents for a run; they wait for its driver."""
    with Agents(here / "nodes") as agents:

        def start(config: Any, count: int) -> Agents:
            token = write_token(here / "token")
            for _ in range(count):
                agents.start(driver_of(config), token)
            return agents

        yield start


@pytest.mark.long
def test_a_lost_node_is_replaced(
    here: Path, nodes: Callable[[Any, int], Agents], caplog: pytest.LogCaptureFixture
) -> None:
    """One of two nodes is killed at batch 13, and a third one takes its place.

    The run resumes from the last checkpoint, of which each node stored its shards. No process is
    left.
    """
    breaks = breaking(here, "lose node", 13, do_rank=1)
    config = on_nodes(here, 16, max_restarts=1, hyperparameters=breaks)
    agents = nodes(config, 3)
    result = train(config)
    assert isinstance(result, TrialResult)
    assert result.batches_trained == 16
    seen = [line[0] for line in lines(here, "samples", 1)]
    assert seen[:13] == list(range(13))
    assert seen[13:] in (list(range(12, 16)), list(range(8, 16)))
    assert "was lost with its node: its agent has closed the connection" in caplog.text
    assert sorted(agent.wait(END_SECONDS) for agent in agents.started) == [-9, 0, 0]
    manifest = CheckpointStore(config.checkpoint_storage.url).list()[-1]
    assert {file.rank for file in manifest.files} == {0, 1}
    assert ranks_in(here) == []
    logs = Path(result.run_dir) / "logs"
    assert {log.name for log in logs.iterdir()} >= {"rank-0.log", "rank-1.log"}


@pytest.mark.long
def test_a_draining_node_is_left_without_a_crash(
    here: Path, nodes: Callable[[Any, int], Agents]
) -> None:
    """An agent gets SIGTERM at batch 13, as before a machine is taken away.

    The run saves where it is, and continues on a spare: no batch is trained twice, and no restart
    is spent.
    """
    breaks = breaking(here, "drain node", 13, do_rank=1)
    config = on_nodes(here, 60, hyperparameters=breaks, min_checkpoint_period=None)
    agents = nodes(config, 3)
    result = train(config)
    assert isinstance(result, TrialResult)
    assert result.batches_trained == 60
    assert result.ledger["slot_seconds"]["drain"] > 0
    for rank in (0, 1):
        assert [line[0] for line in lines(here, "samples", rank)] == list(range(60))
    assert sorted(agent.wait(END_SECONDS) for agent in agents.started) == [0, 0, 128 + 15]
    left = [n for n in range(3) if "leaves the run when that has saved" in agents.log(n)]
    assert len(left) == 1
    report = Path(result.report_path).read_text()
    assert re.search(r"saved, to continue on other nodes: node \S+ \(its agent was asked", report)
    assert "restart" not in report


@pytest.mark.long
def test_a_run_shrinks_and_grows(
    here: Path, nodes: Callable[[Any, int], Agents], caplog: pytest.LogCaptureFixture
) -> None:
    """With a range of slots: a lost node is not waited for, and one that joins later is taken.

    Each batch has the same samples as on two nodes.
    """
    files = {"paused": str(here / "paused"), "wait_for": str(here / "go")}
    breaks = breaking(
        here, "lose node", 13, do_rank=1, batch_size=4, pause_at=22, shuffle=False, **files
    )
    config = on_nodes(
        here, 40, max_restarts=1, hyperparameters=breaks,
        resources={"slots_per_trial": {"min": 1, "max": 2}, "replace_seconds": 5},
    )  # fmt: skip
    agents = nodes(config, 2)

    def offer_a_node() -> None:
        until((here / "paused").exists, "one node trains")
        agents.start(driver_of(config), (here / "token").read_text())
        until(lambda: "there are nodes for 2 slots" in caplog.text, "the node is offered")
        (here / "go").touch()

    with ThreadPoolExecutor() as threads:
        offered = threads.submit(offer_a_node)
        result = train(config)
        offered.result()
    assert isinstance(result, TrialResult)
    assert result.batches_trained == 40
    assert sorted(agent.wait(END_SECONDS) for agent in agents.started) == [-9, 0, 0]
    report = Path(result.report_path).read_text()
    assert re.search(
        r"now rank 0 on (.|\n)*saved, to continue on other nodes: there are nodes for 2 slots"
        r"(.|\n)*now ranks 0 on", report,
    )  # fmt: skip
    records = [lines(here, "samples", rank) for rank in (0, 1)]
    resumed = {line[0] for line in records[0]} - {line[0] for line in records[1]}
    assert resumed == set(range(13, 24))  # batches that one rank trained, of 2 micro-batches each
    for batch in range(40):
        seen = {index for record in records for line in record if line[0] == batch
                for index in line[2:]}  # fmt: skip
        assert seen == {float(4 * batch % 64 + place) for place in range(4)}


@pytest.mark.long
def test_a_number_of_slots_that_the_trial_refuses(
    here: Path, nodes: Callable[[Any, int], Agents], caplog: pytest.LogCaptureFixture
) -> None:
    """Of four nodes one is lost, and three ranks cannot share a batch of 8 samples: two train."""
    config = on_nodes(
        here, 24, max_restarts=1,
        hyperparameters=breaking(here, "lose node", 13, do_rank=3, batch_size=8),
        resources={"slots_per_trial": {"min": 1, "max": 4}, "replace_seconds": 30},
    )  # fmt: skip
    nodes(config, 4)
    result = train(config)
    assert isinstance(result, TrialResult)
    assert result.batches_trained == 24
    assert "the trial refuses 3 slots, so it gets fewer" in caplog.text
    assert "train_batch_size is 8, but 3 data-parallel ranks" in caplog.text
    saved = CheckpointStore(config.checkpoint_storage.url).list()
    assert saved[0].topology.world_size == 4
    assert saved[-1].topology.world_size == 2
    assert {manifest.topology.batch_samples for manifest in saved} == {8}


@pytest.mark.long
def test_a_checkpoint_is_evaluated_on_a_node(
    here: Path, nodes: Callable[[Any, int], Agents]
) -> None:
    """The code is sent to it, as for training."""
    one = {"resources": {"slots_per_trial": 1}}
    saved = train(toy_config(here, 4, **one))
    config = on_nodes(here, 4, **one)
    agents = nodes(config, 1)
    result = evaluate(config, saved.checkpoint_uuid)
    assert result.batches_trained == 4
    assert result.metrics["loss"] == pytest.approx(saved.validation_metrics["loss"])
    assert [agent.wait(END_SECONDS) for agent in agents.started] == [0]


@pytest.mark.long
def test_a_node_that_drains_before_training_is_left_at_once(
    here: Path, nodes: Callable[[Any, int], Agents]
) -> None:
    """Its ranks build the trial, which would take an hour. No restart is spent."""
    config = on_nodes(here, 4, hyperparameters=breaking(here, "drain node", "build", do_rank=1))
    agents = nodes(config, 3)
    result = train(config)
    assert result.batches_trained == 4
    assert sorted(agent.wait(END_SECONDS) for agent in agents.started) == [0, 0, 128 + 15]
    report = Path(result.report_path).read_text()
    assert "ended before training, to continue on other nodes: node " in report
    assert "saved" not in report


@pytest.mark.long
def test_a_node_that_cannot_train_ends_no_run_that_has_trained_without_it(
    here: Path, nodes: Callable[[Any, int], Agents], caplog: pytest.LogCaptureFixture
) -> None:
    """It joins later, is taken, and sees another storage: the run continues as before.

    No restart is spent, so no number of such nodes ends it.
    """
    files = {"paused": str(here / "paused"), "wait_for": str(here / "go")}
    config = on_nodes(
        here, 24, hyperparameters={"pause_at": 6, "batch_size": 4, **files},
        resources={"slots_per_trial": {"min": 1, "max": 2}, "replace_seconds": 0},
    )  # fmt: skip
    agents = nodes(config, 1)
    token = (here / "token").read_text()

    def offer_a_node() -> None:
        until((here / "paused").exists, "one node trains")
        stray = joined_stray(config, token)
        until(lambda: "there are nodes for 2 slots" in caplog.text, "the node is offered")
        (here / "go").touch()
        fail_to_prepare(stray)

    with ThreadPoolExecutor() as threads:
        offered = threads.submit(offer_a_node)
        result = train(config)
        offered.result()
    assert result.batches_trained == 24
    assert not result.stopped_early
    assert [agent.wait(END_SECONDS) for agent in agents.started] == [0]
    report = Path(result.report_path).read_text()
    assert (
        "back to the nodes that have trained, because node stray cannot start its ranks" in report
    )
    assert "the run continues without node stray: node stray cannot start its ranks" in caplog.text
    assert "is lost" not in caplog.text


@pytest.mark.long
def test_a_replacement_that_cannot_train_is_left_for_another_one(
    here: Path, nodes: Callable[[Any, int], Agents]
) -> None:
    """A spare takes the place of a lost node, and sees another storage. The next one does not."""
    breaks = breaking(here, "lose node", 13, do_rank=1)
    config = on_nodes(here, 16, max_restarts=2, hyperparameters=breaks)
    agents = nodes(config, 2)
    token = (here / "token").read_text()

    def offer_nodes() -> None:
        until((here / "once").exists, "the node is lost")
        stray = joined_stray(config, token)
        fail_to_prepare(stray)
        agents.start(driver_of(config), token)

    with ThreadPoolExecutor() as threads:
        offered = threads.submit(offer_nodes)
        result = train(config)
        offered.result()
    assert result.batches_trained == 16
    assert sorted(agent.wait(END_SECONDS) for agent in agents.started) == [-9, 0, 0]
    report = Path(result.report_path).read_text()
    assert "restart 2 of at most 2: node stray cannot start its ranks: this node sees" in report


def joined_stray(config: Any, token: str) -> FakeAgent:
    """A node that has joined and will not be fit to train."""
    stray = FakeAgent(driver_of(config), token.strip(), host="stray")
    assert isinstance(stray.next(), Welcome)
    stray.say(NodeReady(slots=1, address=LOOPBACK))
    return stray


def fail_to_prepare(stray: FakeAgent) -> None:
    """Let a node say that it sees another storage, until it is told to leave."""
    asked = stray.next()
    assert isinstance(asked, PrepareRanks)
    stray.say(RanksPrepared(launch=asked.launch, problem="this node sees another storage"))
    until(lambda: isinstance(stray.next(), Leave), "it is told to leave")
    stray.close()


@pytest.mark.long
def test_what_cannot_run_on_several_machines_is_refused(here: Path) -> None:
    """Before the run waits for a node."""
    with pytest.raises(ConfigError, match="slots_per_trial: auto counts the accelerators of this"):
        train(on_nodes(here, 4, resources={"slots_per_trial": "auto"}))
    with pytest.raises(ConfigError, match="memory:// is seen by this process alone"):
        train(on_nodes(here, 4, checkpoint_storage="memory://"))


def ranks_in(folder: Path) -> list[int]:
    """The ranks that run below a folder, whatever has started them."""
    return [
        each.pid
        for each in psutil.process_iter()
        if "trialflow: rank" in _title(each) and _is_in(each, folder)
    ]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _is_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return Path(process.cwd()).is_relative_to(folder)
    except (psutil.Error, OSError):
        return False
