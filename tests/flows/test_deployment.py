"""The deployment `train` as a team uses it: server, process worker, `prefect deployment run`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.server.events.schemas.automations import EventTrigger
from prefect.server.events.schemas.events import ReceivedEvent

from tests.support.cli import TRIALFLOW, environment_in
from tests.support.prefect import PrefectServer, process_worker
from tests.support.processes import descendants, wait_until_gone
from tests.support.slots import lines, toy_config
from trial_core.checkpoint.store import CheckpointStore
from trialflow.deployments.cli.deploy import wanted_resources
from trialflow.deployments.desired_state import SILENT_RUNS_HAVE_CRASHED, lost_starts_have_crashed
from trialflow.deployments.resources import set_up, take_down

pytestmark = [pytest.mark.slots, pytest.mark.server]

RUN_SECONDS = 240.0
ENDLESS = 10**6


def until(is_so: Callable[[], Any], what: str) -> Any:
    """Wait until it is so; what it then is."""
    deadline = time.monotonic() + RUN_SECONDS
    while not (found := is_so()):
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.2)
    return found


def ended(server: PrefectServer, flow_run_id: str) -> dict[str, Any]:
    """The flow run, once it has reached a final state."""
    deadline = time.monotonic() + RUN_SECONDS
    while time.monotonic() < deadline:
        run: dict[str, Any] = server.query(f"flow_runs/{flow_run_id}")
        if run["state_type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"):
            return run
        time.sleep(0.5)
    raise AssertionError(f"flow run {flow_run_id} is still {run['state_name']}")


def test_a_deployment_run_is_executed_by_a_process_worker(
    prefect_server: PrefectServer, tmp_path: Path
) -> None:
    """`prefect deploy`, `prefect worker start`, `prefect deployment run`: the worker trains the
    toy on 2 ranks; a parameter of the wrong type is refused before anything is scheduled."""
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
        run = ended(prefect_server, scheduled["id"])
        log = prefect_server.home / "worker-local.log"
        assert run["state_name"] == "Completed", log.read_text()[-4000:]
        assert wait_until_gone(descendants(worker), 15) == []
    for rank in (0, 1):
        assert [line[0] for line in lines(tmp_path, "samples", rank)] == list(range(4))
    newest = CheckpointStore(config.checkpoint_storage.url).list()[-1]
    assert newest.trial == f"toy-{run['id'].replace('-', '')[-8:]}"


class Deployed:
    """A server with all that `trialflow deploy` sets up, and an endless run in its queue."""

    def __init__(
        self, server: PrefectServer, client: SyncPrefectClient, folder: Path, pool: str
    ) -> None:
        self.server = server
        self.client = client
        self.folder = folder
        self.pool = pool
        self.home = {"TRIALFLOW_HOME": str(folder / "home")}
        config = toy_config(
            folder, ENDLESS, scheduling_unit=10, min_checkpoint_period={"batches": 10},
            hyperparameters={"record": str(folder)}, max_restarts=1,
        )  # fmt: skip
        self.store = CheckpointStore(config.checkpoint_storage.url)
        deployment = client.read_deployment_by_name("train/train")
        parameters = {"config": config.model_dump(mode="json")}
        run = client.create_flow_run_from_deployment(deployment.id, parameters=parameters)
        self.run_id = str(run.id)

    def state(self) -> str:
        """The flow run's, by name."""
        name: str = self.server.query(f"flow_runs/{self.run_id}")["state_name"]
        return name

    def seen(self) -> list[int]:
        """The batches that rank 0 has trained, over all attempts."""
        return [line[0] for line in lines(self.folder, "samples", 0)]

    def saved(self) -> int:
        """How far the newest checkpoint has got."""
        found = self.store.list()
        return max((manifest.progress.batches_trained for manifest in found), default=0)

    def driver(self, of: int) -> int:
        """The process that runs the flow, below the process `of`."""
        (pid,) = {
            psutil.Process(rank).ppid()
            for rank in descendants(of)
            if "trial_core.slots.worker" in " ".join(psutil.Process(rank).cmdline())
        }
        return pid

    def heartbeats(self) -> list[ReceivedEvent]:
        """What the run's process has said of itself, as the server has it."""
        of_run = {"resource": {"id": [f"prefect.flow-run.{self.run_id}"]}}
        asked = {"filter": {**of_run, "event": {"name": ["prefect.flow-run.heartbeat"]}}}
        found = self.server.query("events/filter", asked)["events"]
        return [ReceivedEvent.model_validate(each) for each in found]

    def end(self) -> None:
        """Nobody takes the run up again."""
        self.server.query(f"flow_runs/{self.run_id}/set_state", {
            "state": {"type": "CANCELLED", "name": "Cancelled"}, "force": True,
        })  # fmt: skip


@pytest.fixture
def deployed(prefect_server: PrefectServer, tmp_path: Path) -> Iterator[Deployed]:
    pool = f"pool-{tmp_path.name}"
    with prefect_server.configured(), get_client(sync_client=True) as client:
        things = wanted_resources("process", pool, None, tmp_path)
        list(set_up(things, client, dry_run=False))
        scene = Deployed(prefect_server, client, tmp_path, pool)
        yield scene
        scene.end()
        list(take_down(reversed(things), client, dry_run=False))


@pytest.mark.long
def test_a_run_that_is_killed_goes_on_as_the_same_run(deployed: Deployed) -> None:
    """SIGKILL to its driver: the automation has it trained on from its last checkpoint, within
    seconds. What it says while it lives is what the automations wait for."""
    with process_worker(deployed.server, deployed.pool, deployed.home) as worker:
        until(lambda: deployed.saved() >= 20, "a checkpoint")
        (heartbeat, *_) = until(deployed.heartbeats, "a heartbeat")
        for name in (SILENT_RUNS_HAVE_CRASHED, lost_starts_have_crashed(deployed.pool)):
            (rule,) = deployed.client.read_automations_by_name(name)
            trigger = EventTrigger.model_validate(rule.trigger.model_dump())
            assert trigger.covers(heartbeat)
            assert trigger.expects(heartbeat.event)
        trained = len(deployed.seen())
        os.kill(deployed.driver(worker), signal.SIGKILL)
        until(lambda: len(deployed.seen()) > trained + 30, "training again")
        assert deployed.state() == "Running"
        resumed = deployed.seen()[trained:]
        begin = next(
            index for index in range(1, len(resumed)) if resumed[index] < resumed[index - 1]
        )
        assert resumed[begin] % 10 == 0
        assert resumed[begin] >= 20 - 10


@pytest.mark.long
def test_a_worker_that_is_stopped_lets_its_runs_save(deployed: Deployed) -> None:
    """`trialflow worker`, SIGTERM (systemd): the run saves and waits in its queue, no process is
    left; another worker goes on with it."""
    for expected in (0, 1):
        before = len(deployed.seen())
        worker = subprocess.Popen(
            [*TRIALFLOW, "worker", "--pool", deployed.pool],
            cwd=deployed.folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            env=environment_in(deployed.folder, {**deployed.server.environment, **deployed.home}),
        )  # fmt: skip
        try:
            until(lambda: len(deployed.seen()) > before + 15, "training")  # noqa: B023
            started = descendants(worker.pid)
            worker.send_signal(signal.SIGTERM)
            worker.wait(RUN_SECONDS)
        finally:
            worker.kill()
        assert worker.returncode == 143
        assert wait_until_gone(started, 10) == []
        assert deployed.state() in ("AwaitingRetry", "Late")
        assert deployed.saved() == len(deployed.seen())
        assert deployed.seen() == list(range(deployed.saved()))
        run = deployed.server.query(f"flow_runs/{deployed.run_id}")
        assert run["run_count"] == expected + 1


@pytest.mark.long
def test_a_container_that_is_stopped_lets_its_run_save(deployed: Deployed) -> None:
    """What our images run (`python -m prefect.engine`), SIGTERM (a node is drained): the run saves
    and goes back into its queue."""
    engine = subprocess.Popen(
        [sys.executable, "-m", "prefect.engine"],
        cwd=deployed.folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        env={
            **environment_in(deployed.folder, {**deployed.server.environment, **deployed.home}),
            "PREFECT__FLOW_RUN_ID": deployed.run_id,
        },
    )  # fmt: skip
    try:
        until(lambda: len(deployed.seen()) > 15, "training")
        started = descendants(engine.pid)
        engine.send_signal(signal.SIGTERM)
        assert engine.wait(RUN_SECONDS) == 0
    finally:
        engine.kill()
    assert wait_until_gone(started, 10) == []
    assert deployed.state() in ("AwaitingRetry", "Late")
    assert deployed.saved() == len(deployed.seen())
