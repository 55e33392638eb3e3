"""Runs on the nodes of each provider, with a real cluster on this machine.

`test_nodes` has more runs whose agents are started by hand, and
`tests/trial_core/processes/nodes/test_provider_conformance.py` what providers do without ranks.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest
from prefect.client.orchestration import get_client
from prefect.flow_runs import resume_flow_run
from prefect.logging.configuration import setup_logging
from prefect.states import Suspended

from tests.support.flow import breaking, train
from tests.support.node_clusters import NodeCluster, agents_of, driver_address, made_cluster
from tests.support.nodes import LOOPBACK
from tests.support.prefect import PrefectServer
from tests.support.prefect_worker import Scene, assert_saved_where_it_ended
from tests.support.processes import descendants, kill, wait_until_gone
from tests.support.slots import lines, toy_config
from tests.support.waiting import WAIT_SECONDS, until
from tests.support.ways_to_stop import SAVING, Worker, on_a_worker
from trial_core.errors import LaunchError
from trial_core.processes.nodes.join_token import write_token

pytestmark = [pytest.mark.long, pytest.mark.slots, pytest.mark.server]


@pytest.fixture(params=["ray", "slurm"])
def cluster(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[NodeCluster]:
    """Two nodes, used by runs of this process."""
    setup_logging()  # Prefect's first one would remove the handler of `caplog` during the test
    for made in made_cluster(request):
        for name, value in made.variables().items():
            monkeypatch.setenv(name, value)
        yield made


def on_two_nodes(cluster: NodeCluster, **changes: Any) -> dict[str, Any]:
    """The resources of an experiment whose two ranks are on two nodes."""
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1]
    return {
        "slots_per_trial": 2, "slots_per_node": 1, "max_wait_seconds": 120, "accelerator": "cpu",
        "channel": {"bind": LOOPBACK, "ports": port}, **cluster.resources(), **changes,
    }  # fmt: skip


def experiment(here: Path, resources: dict[str, Any], batches: int, **changes: Any) -> Any:
    """Saved every 4 batches."""
    fields: dict[str, Any] = {"scheduling_unit": 4, "min_checkpoint_period": {"batches": 4}}
    return toy_config(here, batches, resources=resources, **{**fields, **changes})


def train_while(config: Any, harm: Callable[[], None]) -> Any:
    """Train, and meanwhile do harm to the nodes."""
    with ThreadPoolExecutor() as threads:
        harmed = threads.submit(harm)
        result = train(config)
        harmed.result()
    return result


def pausing(here: Path, at_batch: int) -> dict[str, Any]:
    """Hyperparameters of ranks that wait in a batch."""
    return {
        "record": str(here), "pause_at": at_batch, "paused": str(here / "paused"),
        "wait_for": str(here / "go"),
    }  # fmt: skip


def test_a_lost_agent_is_replaced(here: Path, cluster: NodeCluster) -> None:
    """The run goes back to its last checkpoint, and completes. Nothing is left."""
    breaks = breaking(here, "lose node", 13, do_rank=1)
    resources = on_two_nodes(cluster)
    result = train(experiment(here, resources, 16, max_restarts=1, hyperparameters=breaks))
    assert result.batches_trained == 16
    seen = [line[0] for line in lines(here, "samples", 1)]
    assert seen[:13] == list(range(13))
    assert seen[13:] in (list(range(12, 16)), list(range(8, 16)))
    assert "was lost with its node: " in Path(result.report_path).read_text()
    assert agents_of(resources) == []


def test_a_draining_node_is_left_without_a_crash(
    here: Path, cluster: NodeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """The run saves where it is and continues on another node: no batch is trained twice."""

    def drain() -> None:
        until((here / "paused").exists, "the ranks train")
        cluster.drain(cluster.machines[1])
        cluster.add()
        until(lambda: "will be taken away" in caplog.text, "the run knows")
        (here / "go").touch()

    config = experiment(here, on_two_nodes(cluster), 40, hyperparameters=pausing(here, 13))
    result = train_while(config, drain)
    assert result.batches_trained == 40
    for rank in (0, 1):
        assert [line[0] for line in lines(here, "samples", rank)] == list(range(40))
    report = Path(result.report_path).read_text()
    assert re.search(r"saved, to continue on other nodes: node \S+ \(", report)
    assert "restart" not in report


def test_a_run_shrinks_and_grows(
    here: Path, cluster: NodeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """A lost node is not waited for, and one that becomes available later is taken."""

    def lose_and_add() -> None:
        until((here / "paused").exists, "two nodes train")
        cluster.lose(cluster.machines[1])
        until(lambda: "is lost" in caplog.text, "the node is lost")
        (here / "paused").unlink()
        until((here / "paused").exists, "one node trains")
        cluster.add()
        until(lambda: "there are nodes for 4 slots" in caplog.text, "the node is offered")
        (here / "go").touch()

    # Nodes as large as machines: Ray may put two smaller ones on one machine.
    resources = on_two_nodes(
        cluster, slots_per_trial={"min": 2, "max": 4}, slots_per_node=2, replace_seconds=20
    )
    config = experiment(
        here, resources, 40, max_restarts=1,
        hyperparameters={**pausing(here, 13), "batch_size": 8},
    )  # fmt: skip
    result = train_while(config, lose_and_add)
    assert result.batches_trained == 40
    report = Path(result.report_path).read_text()
    assert re.search(
        r"now ranks 0-1 on [^,|]+ \|"
        r"(.|\n)*saved, to continue on other nodes: there are nodes for 4 slots", report,
    )  # fmt: skip


@pytest.mark.parametrize("cluster", ["ray", "slurm", "join"], indirect=True)
def test_a_run_is_suspended_resumed_killed_and_cancelled(
    prefect_server: PrefectServer,
    shared_worker: Worker,
    cluster: NodeCluster,
    tmp_path: Path,
) -> None:
    """Each time no process is left on any node, and the trial continues where it was saved."""
    resources = on_two_nodes(cluster)
    token = write_token(tmp_path / "token")
    resources["channel"]["token_file"] = str(tmp_path / "token")
    expect = partial(cluster.expect, driver_address(resources), token)
    home = {"TRIALFLOW_HOME": str(tmp_path / "home")}
    expect()
    with on_a_worker(
        prefect_server, shared_worker, tmp_path, {"env": {**home, **cluster.variables()}},
        resources=resources, **SAVING,
    ) as scene:  # fmt: skip
        processes = started(scene, resources)
        with prefect_server.configured(), get_client(sync_client=True) as client:
            client.set_flow_run_state(UUID(scene.run_id), Suspended(timeout_seconds=600))
        assert_gone(processes, resources)
        saved = assert_saved_where_it_ended(scene)
        expect()
        with prefect_server.configured():
            resume_flow_run(UUID(scene.run_id))
        scene.until_resumed(saved, saved)

        until(lambda: scene.saved() > saved, "another checkpoint")
        processes = started(scene, resources)
        kill([driver_of(scene, resources)])
        assert_gone(processes, resources)

        seen = len(scene.seen())
        expect()
        scene.create_run(scene.trial)
        scene.until_resumed(scene.saved(), seen)
        processes = started(scene, resources)
        scene.cancel()
        scene.until_state("Cancelled")
        assert_gone(processes, resources)
        assert_saved_where_it_ended(scene)


def test_more_slots_than_the_cluster_has(here: Path, cluster: NodeCluster) -> None:
    """The run fails at once, and says what each node has."""
    resources = on_two_nodes(cluster, slots_per_trial=64, slots_per_node=2)
    with pytest.raises(LaunchError, match=cluster.refusal):
        train(experiment(here, resources, 16))


def started(scene: Scene, resources: dict[str, Any]) -> list[int]:
    """The driver of a run that trains, its agents, and all their children."""
    scene.until_trained(len(scene.seen()) + 5)
    parents = [driver_of(scene, resources), *agents_of(resources)]
    assert len(parents) >= 3  # two agents, and what a provider starts them with
    return [*parents, *(child for parent in parents for child in descendants(parent))]


def driver_of(scene: Scene, resources: dict[str, Any]) -> int:
    """The process that listens for a run's agents."""
    is_driver = partial(listens, resources["channel"]["ports"])
    return next(pid for pid in descendants(scene.parent) if is_driver(pid))


def listens(port: int, pid: int) -> bool:
    connections = psutil.Process(pid).net_connections("tcp")
    return port in [each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN]


def assert_gone(processes: list[int], resources: dict[str, Any]) -> None:
    """None of these processes is left, and no agent."""
    assert wait_until_gone(processes, WAIT_SECONDS) == []
    assert agents_of(resources) == []
