"""A run that is asked to stop: by the server's word, by a signal to its worker, by its budget."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest
from prefect.client.orchestration import get_client
from prefect.flow_runs import resume_flow_run
from prefect.states import Suspended

import flows.stopping
from tests.support.flow import train
from tests.support.prefect import PrefectServer, process_worker
from tests.support.processes import descendants, wait_until_gone
from tests.support.slots import lines, toy_config
from trial_core.checkpoint.store import CheckpointStore
from trial_core.errors import Stopped

pytestmark = [pytest.mark.slots, pytest.mark.server]

PATIENCE_SECONDS = 60.0
ENDLESS = 10**6


def until(is_so: Callable[[], Any], what: str) -> Any:
    """Wait until it is so; what it then is."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := is_so()):
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.2)
    return found


class Scene:
    """A worker that trains an endless toy on two ranks, and its server."""

    def __init__(self, server: PrefectServer, worker: int, folder: Path, config: Any) -> None:
        self.server = server
        self.worker = worker
        self.folder = folder
        self.store = CheckpointStore(config.checkpoint_storage.url)
        self.run_id = ""

    def state(self) -> str:
        """The flow run's, by name."""
        name: str = self.server.query(f"flow_runs/{self.run_id}")["state_name"]
        return name

    def seen(self) -> list[int]:
        """The batches that rank 0 has trained, over all attempts."""
        return [line[0] for line in lines(self.folder, "samples", 0)]

    def driver(self) -> int:
        """The process that runs the flow."""
        (pid,) = {
            psutil.Process(rank).ppid()
            for rank in descendants(self.worker)
            if "trial_core.slots.worker" in " ".join(psutil.Process(rank).cmdline())
        }
        return pid

    def set_state(self, kind: str, name: str) -> None:
        """What the UI's buttons do."""
        self.server.query(
            f"flow_runs/{self.run_id}/set_state", {"state": {"type": kind, "name": name}}
        )

    def assert_saved_where_it_ended(self) -> int:
        """The newest checkpoint is of the last batch that any rank has trained; which that was."""
        (newest, *_) = self.store.candidates(self.store.list()[-1].trial)
        trained = newest.progress.batches_trained
        for rank in (0, 1):
            assert len(lines(self.folder, "samples", rank)) == trained
        return trained


@pytest.fixture
def scene(prefect_server: PrefectServer, tmp_path: Path) -> Iterator[Scene]:
    """Trains by now."""
    pool = f"pool-{tmp_path.name}"
    prefect_server.prefect("work-pool", "create", pool, "--type", "process")
    prefect_server.prefect(
        "deploy", "--prefect-file", "deployments/prefect.yaml", "--name", "train", "--pool", pool
    )  # fmt: skip
    config = toy_config(
        tmp_path, ENDLESS, scheduling_unit=ENDLESS, hyperparameters={"record": str(tmp_path)}
    )
    deployment = prefect_server.query("deployments/name/train/train")
    home = {"TRIALFLOW_HOME": str(tmp_path / "home")}
    with process_worker(prefect_server, pool, home) as worker:
        scene = Scene(prefect_server, worker, tmp_path, config)
        scene.run_id = prefect_server.query(
            f"deployments/{deployment['id']}/create_flow_run",
            {"parameters": {"config": config.model_dump(mode="json")}},
        )["id"]
        until(lambda: len(scene.seen()) > 5, "training")
        yield scene


def test_a_cancelled_run_saves_first(scene: Scene) -> None:
    """Cancel in the UI: saved where it was, shown as Cancelled, no process left."""
    started = descendants(scene.worker)
    scene.set_state("CANCELLING", "Cancelling")
    until(lambda: scene.state() == "Cancelled", "Cancelled")
    assert wait_until_gone(started, 15) == []
    assert scene.assert_saved_where_it_ended() > 5


def test_a_preempted_run_goes_on_by_itself(scene: Scene) -> None:
    """SIGTERM to its driver: saved, back in the queue, and the same run trains on from there."""
    before = scene.driver()
    os.kill(before, signal.SIGTERM)
    assert wait_until_gone([before], PATIENCE_SECONDS) == []
    saved = scene.store.list()[-1].progress.batches_trained
    until(lambda: scene.state() == "Running" and len(scene.seen()) > saved + 5, "training again")
    assert scene.seen()[: saved + 5] == list(range(saved + 5))
    scene.set_state("CANCELLING", "Cancelling")
    until(lambda: scene.state() == "Cancelled", "Cancelled")


@pytest.mark.long
def test_a_suspended_run_stays_so_until_it_is_resumed(scene: Scene) -> None:
    """Suspend: saved, no process left; Resume: the same run goes on from there."""
    before = scene.driver()
    with scene.server.configured(), get_client(sync_client=True) as client:
        client.set_flow_run_state(UUID(scene.run_id), Suspended(timeout_seconds=600))
    assert wait_until_gone([before], PATIENCE_SECONDS) == []
    saved = scene.assert_saved_where_it_ended()
    assert scene.state() == "Suspended"
    with scene.server.configured():
        resume_flow_run(UUID(scene.run_id))
    until(lambda: len(scene.seen()) > saved + 5, "training again")
    assert scene.seen()[: saved + 5] == list(range(saved + 5))


def test_a_time_budget_that_is_over(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run saves and ends as one that has completed, to be resumed; before there is anything
    to save, it ends at once and says so."""
    monkeypatch.setattr(flows.stopping, "LOOK_SECONDS", 0.1)

    def within(seconds: float) -> Any:
        return toy_config(
            here, ENDLESS, scheduling_unit=ENDLESS, resources={"slots_per_trial": 1},
            stopping={"time_budget_seconds": seconds},
        )  # fmt: skip

    with pytest.raises(Stopped, match=r"ranks were starting|before there was anything to save"):
        train(within(0.2))
    result = train(within(15))
    assert result.stopped_early
    assert result.stop_reason == "time budget (15 s are over)"
    (manifest,) = CheckpointStore(f"file://{here}/checkpoints").list(result.trial)
    assert manifest.progress.batches_trained == result.batches_trained > 0
