"""The deployment `train` in use: server, worker, `prefect deployment run`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from prefect.client.orchestration import get_client

from tests.support.cli import TRIALFLOW, environment_in
from tests.support.prefect import PrefectServer, process_worker
from tests.support.prefect_worker import Scene, assert_closed
from tests.support.processes import descendants, wait_until_gone
from tests.support.slots import lines, toy_config
from tests.support.waiting import WAIT_SECONDS, until
from tests.support.ways_to_stop import cleared
from trial_core.checkpoint.store import CheckpointStore
from trial_core.processes.machine.run_dirs import trial_id
from trialflow.deployments.automations import CRASH_SILENT, crash_lost_starts
from trialflow.deployments.cli.deploy import wanted_resources
from trialflow.deployments.resources import set_up, take_down

if TYPE_CHECKING:
    from prefect.server.events.schemas.events import ReceivedEvent  # the server: by each test

pytestmark = [pytest.mark.slots, pytest.mark.server]

FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


@pytest.fixture
def no_deployment_after(prefect_server: PrefectServer) -> Iterator[None]:
    """Deletes what the test has deployed as `train/train`: other tests count its runs."""
    yield
    prefect_server.prefect("deployment", "delete", "train/train")


@pytest.mark.long
@pytest.mark.usefixtures("no_deployment_after")
def test_prefects_own_commands(prefect_server: PrefectServer, tmp_path: Path) -> None:
    """`prefect deploy`, `prefect worker start` and `prefect deployment run` train a trial. A
    parameter of a wrong type is refused before a run is scheduled."""
    prefect_server.prefect("work-pool", "create", "local", "--type", "process")
    prefect_server.prefect(
        "deploy", "--prefect-file", "deployments/prefect.yaml", "--name", "train"
    )  # fmt: skip
    config = toy_config(tmp_path, 4, hyperparameters={"record": str(tmp_path)})
    parameters = {"config": config.model_dump(mode="json")}

    wrong = json.loads(json.dumps(parameters))
    wrong["config"]["searcher"]["max_length"] = {"batches": "ten"}
    with pytest.raises(AssertionError, match="batches"):
        prefect_server.prefect("deployment", "run", "train/train", "--params", json.dumps(wrong))

    home = {"TRIALFLOW_HOME": str(tmp_path / "home")}
    with process_worker(prefect_server, "local", home) as worker:
        prefect_server.prefect(
            "deployment", "run", "train/train", "--params", json.dumps(parameters)
        )  # fmt: skip
        (scheduled,) = prefect_server.query(
            "flow_runs/filter", {"deployments": {"name": {"any_": ["train"]}}}
        )
        run_path = f"flow_runs/{scheduled['id']}"
        until(lambda: prefect_server.query(run_path)["state_type"] in FINAL, "the end of the run")
        log = prefect_server.home / "worker-local.log"
        run = prefect_server.query(run_path)
        assert run["state_name"] == "Completed", log.read_text()[-4000:]
        assert wait_until_gone(descendants(worker), 15) == []
    for rank in (0, 1):
        assert [line[0] for line in lines(tmp_path, "samples", rank)] == list(range(4))
    newest = CheckpointStore(config.checkpoint_storage.url).list()[-1]
    assert newest.trial == trial_id("toy", run["id"])


@pytest.fixture
def deployed(prefect_server: PrefectServer, tmp_path: Path) -> Iterator[Scene]:
    """An endless run in the queue of a server that `trialflow deploy` has set up."""
    with prefect_server.configured(), get_client(sync_client=True) as client:
        resources = wanted_resources("process", pool_of(tmp_path), None, tmp_path)
        list(set_up(resources, client, dry_run=False))
        every_10 = {"scheduling_unit": 10, "min_checkpoint_period": {"batches": 10}}
        with cleared(Scene(prefect_server, tmp_path, max_restarts=1, **every_10)) as scene:
            scene.use_deployment("train", parent=0)
            scene.create_run()
            yield scene
        list(take_down(reversed(resources), client, dry_run=False))


def pool_of(folder: Path) -> str:
    return f"pool-{folder.name}"


def heartbeats(scene: Scene) -> list[ReceivedEvent]:
    """The heartbeats of the run that the server has received."""
    from prefect.server.events.schemas.events import ReceivedEvent

    of_run = {"resource": {"id": [f"prefect.flow-run.{scene.run_id}"]}}
    query = {"filter": {**of_run, "event": {"name": ["prefect.flow-run.heartbeat"]}}}
    found = scene.server.query("events/filter", query)["events"]
    return [ReceivedEvent.model_validate(each) for each in found]


@pytest.mark.long
@pytest.mark.parametrize("loses_supervisor", [False, True], ids=["driver", "with_its_supervisor"])
def test_a_killed_run_resumes_as_the_same_run(deployed: Scene, loses_supervisor: bool) -> None:
    """After SIGKILL of its driver no process is left within 10 s, and the run resumes from its last
    checkpoint: its supervisor starts the driver again, or else the automation does. The automations
    match the heartbeats of a living run."""
    from prefect.server.events.schemas.automations import EventTrigger

    pool = pool_of(deployed.folder)
    with process_worker(deployed.server, pool, deployed.variables) as worker:
        deployed.parent = worker
        until(lambda: len(deployed.store.list()) >= 2, "two checkpoints")
        (heartbeat, *_) = until(lambda: heartbeats(deployed), "a heartbeat")
        for name in (CRASH_SILENT, crash_lost_starts(pool)):
            with get_client(sync_client=True) as client:
                (automation,) = client.read_automations_by_name(name)
            trigger = EventTrigger.model_validate(automation.trigger.model_dump())
            assert trigger.covers(heartbeat)
            assert trigger.expects(heartbeat.event)
        driver, before, ports = deployed.driver(), deployed.processes(), deployed.ports()
        supervisor = psutil.Process(driver).ppid()
        if loses_supervisor:
            os.kill(supervisor, signal.SIGKILL)
        else:
            before.remove(supervisor)
        os.kill(driver, signal.SIGKILL)
        assert wait_until_gone(before, 10) == []
        assert_closed(ports)
        deployed.until_resumed(deployed.saved(), len(deployed.seen()))
        assert deployed.state() == "Running"
        assert ("Crashed" in deployed.history()) == loses_supervisor
        assert (psutil.Process(deployed.driver()).ppid() == supervisor) != loses_supervisor


@pytest.mark.long
def test_a_stopped_worker_requeues_its_run(deployed: Scene) -> None:
    """After SIGTERM to `trialflow worker` (systemd) the run saves and goes back into its queue, and
    no process is left. Another worker resumes it."""
    variables = {**deployed.server.environment, **deployed.variables}
    for attempt in range(2):
        before = len(deployed.seen())
        worker = subprocess.Popen(
            [*TRIALFLOW, "worker", "--pool", pool_of(deployed.folder)],
            cwd=deployed.folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            env=environment_in(deployed.folder, variables),
        )  # fmt: skip
        try:
            deployed.until_trained(before + 15)
            started = descendants(worker.pid)
            worker.send_signal(signal.SIGTERM)
            worker.wait(WAIT_SECONDS)
        finally:
            worker.kill()
        assert worker.returncode == 143
        assert wait_until_gone(started, 10) == []
        assert deployed.state() in ("AwaitingRetry", "Late")
        assert deployed.saved() == len(deployed.seen())
        assert deployed.seen() == list(range(deployed.saved()))
        assert deployed.run()["run_count"] == attempt + 1
