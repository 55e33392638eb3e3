"""The final state of a stopped flow run, whatever others do to it while it saves.

On a real server, with a stand-in for training that waits for the stop request.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import flow, runtime, task
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import Abort, CancelledRun, ObjectNotFound, Pause, TerminationSignal
from prefect.flow_engine import run_flow
from prefect.states import Cancelling, Crashed, Failed, Scheduled, Suspended

import trialflow.flows.lifecycle.flow_run_reader
import trialflow.flows.lifecycle.stop_monitor
import trialflow.flows.train
from tests.support.prefect import PrefectServer
from tests.support.slots import toy_config
from trial_core.errors import StorageError
from trial_core.run.stop_requests import StopHandler
from trialflow.flows.train import TrialResult

pytestmark = pytest.mark.server

TIMEOUT_SECONDS = 30.0


def set_state(flow_run: UUID, state: Any) -> None:
    """As a person or an automation does."""
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run, state, force=True)


def state_of(flow_run: UUID) -> str:
    with get_client(sync_client=True) as client:
        return str(client.read_flow_run(flow_run).state_name)


class Stage:
    """Runs flows of a deployment in this process, without training.

    Attributes:
        act: called in place of training, with the flow run's id.
        training: the flow run that trained.
    """

    def __init__(self, server: PrefectServer, folder: Path) -> None:
        self.server, self.config = server, toy_config(folder)
        self.training: UUID | None = None
        self.act: Callable[[UUID, StopHandler], None] = lambda flow_run, stopping: None

    def train_trial(
        self, config: Any, trial: str, stopping: StopHandler, devices: Any, take_over: bool
    ) -> TrialResult:
        """The stand-in for `trialflow.flows.train.train_trial`."""
        self.training = UUID(str(runtime.flow_run.id))
        self.act(self.training, stopping)
        return TrialResult(trial, batches_trained=10, stopped_early=True)

    def create_run(self, what: Any) -> UUID:
        """A deployment's flow run, pending on a worker."""
        created = self.server.query("flows/", {"name": what.name})
        deployment = self.server.query("deployments/", {"name": "here", "flow_id": created["id"]})
        run = self.server.query(
            f"deployments/{deployment['id']}/create_flow_run",
            {
                "parameters": {"config": self.config.model_dump(mode="json")},
                "state": {"type": "PENDING"},
            },
        )
        return UUID(run["id"])

    def execute(self, what: Any, run: UUID) -> Any:
        """As a worker's process does."""
        with get_client(sync_client=True) as client:
            flow_run = client.read_flow_run(run)
        return run_flow(what, flow_run=flow_run)

    def train(self) -> tuple[UUID, Any]:
        """Run the flow `train`; the run's id, and what the flow returned or raised."""
        run = self.create_run(trialflow.flows.train.train)
        try:
            return run, self.execute(trialflow.flows.train.train, run)
        except (Abort, CancelledRun, Pause, TerminationSignal) as end:
            return run, end


@pytest.fixture
def stage(
    prefect_server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Stage]:
    stage = Stage(prefect_server, tmp_path)
    monkeypatch.setattr(trialflow.flows.train, "train_trial", stage.train_trial)
    monkeypatch.setattr(trialflow.flows.lifecycle.stop_monitor, "POLL_SECONDS", 0.1)
    # Prefect forwards the signal to the previous handler, which here is pytest's.
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    with prefect_server.configured():
        yield stage
    signal.signal(signal.SIGTERM, before)


def suspended(flow_run: UUID, stopping: StopHandler) -> None:
    set_state(flow_run, Suspended(timeout_seconds=3600))
    assert stopping.wait(TIMEOUT_SECONDS)


def suspended_and_resumed(flow_run: UUID, stopping: StopHandler) -> None:
    suspended(flow_run, stopping)
    set_state(flow_run, Scheduled())


def marked_crashed(flow_run: UUID, stopping: StopHandler) -> None:
    set_state(flow_run, Crashed())
    assert stopping.wait(TIMEOUT_SECONDS)


def marked_failed(flow_run: UUID, stopping: StopHandler) -> None:
    set_state(flow_run, Failed())
    assert stopping.wait(TIMEOUT_SECONDS)


def deleted(flow_run: UUID, stopping: StopHandler) -> None:
    """As a person does in the UI."""
    with get_client(sync_client=True) as client:
        client.delete_flow_run(flow_run)
    assert stopping.wait(TIMEOUT_SECONDS)


def out_of_time_and_suspended(flow_run: UUID, stopping: StopHandler) -> None:
    stopping.ask("time budget")
    assert stopping.wait(TIMEOUT_SECONDS)
    set_state(flow_run, Suspended(timeout_seconds=3600))


def preempted(flow_run: UUID, stopping: StopHandler) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    assert stopping.wait(TIMEOUT_SECONDS)


def preempted_and_cancelled(flow_run: UUID, stopping: StopHandler) -> None:
    preempted(flow_run, stopping)
    set_state(flow_run, Cancelling())


def preempted_and_unable_to_save(flow_run: UUID, stopping: StopHandler) -> None:
    preempted(flow_run, stopping)
    raise StorageError("503 SlowDown")


@pytest.mark.parametrize(
    ("act", "state"),
    [
        (suspended, "Suspended"),
        (suspended_and_resumed, "Scheduled"),
        (marked_crashed, "Crashed"),
        pytest.param(marked_failed, "Failed", marks=pytest.mark.long),
        pytest.param(out_of_time_and_suspended, "Suspended", marks=pytest.mark.long),
        (preempted_and_cancelled, "Cancelled"),
        (preempted_and_unable_to_save, "AwaitingRetry"),
    ],
)
def test_the_final_state(
    stage: Stage, act: Callable[[UUID, StopHandler], None], state: str
) -> None:
    """An unfinished run is never Completed, and a state set by others stays.

    Afterwards the signal handlers are restored.
    """
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    stage.act = act
    run, result = stage.train()
    assert not isinstance(result, TrialResult)
    assert state_of(run) == state
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


@flow(name="pipeline")
def pipeline(config: dict[str, Any]) -> None:
    """Trains, then runs another task."""
    trialflow.flows.train.train(config)
    next_task()


@task(name="next-task")
def next_task() -> None:
    raise AssertionError("the flow was stopped, but continued")


def test_a_preempted_subflow_is_not_requeued(stage: Stage) -> None:
    """No worker would take it: SIGTERM ends its parent flow as well."""
    stage.act = preempted
    parent = stage.create_run(pipeline)
    with pytest.raises(TerminationSignal):
        stage.execute(pipeline, parent)
    assert stage.training is not None
    assert {state_of(parent), state_of(stage.training)} == {"Crashed"}


def test_a_subflow_is_suspended_with_its_parent(stage: Stage) -> None:
    """It saves and ends; the parent does not continue, and stays Suspended."""
    parent = stage.create_run(pipeline)
    stage.act = lambda flow_run, stopping: suspended(parent, stopping)
    with pytest.raises(Pause):
        stage.execute(pipeline, parent)
    assert state_of(parent) == "Suspended"


def test_the_time_budget_needs_no_server(stage: Stage) -> None:
    """A server that does not answer in time does not delay the end of the time budget."""
    requests: list[str] = []

    def out_of_time(flow_run: UUID, stopping: StopHandler) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                trialflow.flows.lifecycle.stop_monitor.StopMonitor,
                "_check_state",
                lambda self: stopping.wait(TIMEOUT_SECONDS),
            )
            assert stopping.wait(TIMEOUT_SECONDS)
            requests.append(str(stopping.request))

    stage.act = out_of_time
    stage.config = stage.config.model_copy(
        update={"stopping": stage.config.stopping.model_copy(update={"time_budget_seconds": 0.5})}
    )
    run, result = stage.train()
    assert requests == ["time budget (0.5 s are over)"]
    assert state_of(run) == "Completed"
    assert isinstance(result, TrialResult)


def test_a_deleted_run_stops(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """It saves and ends. Its flow run stays deleted."""
    monkeypatch.setattr(trialflow.flows.lifecycle.flow_run_reader, "DELETION_SECONDS", 0.2)
    stage.act = deleted
    run, result = stage.train()
    assert isinstance(result, Abort)
    assert str(result) == "cancelled (its flow run was deleted)"
    with pytest.raises(ObjectNotFound):
        state_of(run)


def test_a_404_is_no_deletion(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training continues through a minute of 404 that no healthy server has answered."""
    reads: list[UUID] = []
    has_read_often = threading.Event()

    def read_flow_run(client: SyncPrefectClient, flow_run: UUID) -> Any:
        reads.append(flow_run)
        if len(reads) > 9:
            has_read_often.set()
        raise ObjectNotFound(http_exc=Exception("404"))

    def misbehaving(flow_run: UUID, stopping: StopHandler) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SyncPrefectClient, "read_flow_run", read_flow_run)
            assert has_read_often.wait(TIMEOUT_SECONDS)
        assert stopping.request is None

    stage.act = misbehaving
    run, result = stage.train()
    assert isinstance(result, TrialResult)
    assert state_of(run) == "Completed"
