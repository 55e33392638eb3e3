"""The state that a stopped run's flow run ends with, whatever others do to it while it saves.

On a real server; what trains is a stand-in that waits until it is asked to stop.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import flow, runtime, task
from prefect.client.orchestration import get_client
from prefect.exceptions import Abort, CancelledRun, Pause, TerminationSignal
from prefect.flow_engine import run_flow
from prefect.states import Cancelling, Crashed, Failed, Scheduled, Suspended

import trialflow.flows.lifecycle.stop_watch
import trialflow.flows.train
from tests.support.prefect import PrefectServer
from tests.support.slots import toy_config
from trial_core.errors import StorageError
from trial_core.run.stop_request import StopHandler
from trialflow.flows.train import TrialResult

pytestmark = pytest.mark.server

WAIT = 30.0


def put(flow_run: UUID, state: Any) -> None:
    """As a person, or an automation, does it."""
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run, state, force=True)


def state_of(flow_run: UUID) -> str:
    with get_client(sync_client=True) as client:
        return str(client.read_flow_run(flow_run).state_name)


class Stage:
    """Runs flows of a deployment in this process, and trains nothing in them."""

    def __init__(self, server: PrefectServer, folder: Path) -> None:
        self.server, self.config = server, toy_config(folder)
        self.trains: UUID | None = None
        self.act: Callable[[UUID, StopHandler], None] = lambda flow_run, stopping: None

    def train_trial(
        self, config: Any, trial: str, stopping: StopHandler, devices: Any
    ) -> TrialResult:
        """In place of the one that trains."""
        self.trains = UUID(str(runtime.flow_run.id))
        self.act(self.trains, stopping)
        return TrialResult(trial, batches_trained=10, stopped_early=True)

    def run(self, what: Any, parameters: dict[str, Any]) -> UUID:
        """The id of a flow run that a worker would now execute."""
        created = self.server.query("flows/", {"name": what.name})
        deployment = self.server.query("deployments/", {"name": "here", "flow_id": created["id"]})
        run = self.server.query(
            f"deployments/{deployment['id']}/create_flow_run",
            {"parameters": parameters, "state": {"type": "PENDING"}},
        )
        return UUID(run["id"])

    def execute(self, what: Any, run: UUID) -> Any:
        """As a worker's process does it."""
        with get_client(sync_client=True) as client:
            flow_run = client.read_flow_run(run)
        return run_flow(what, flow_run=flow_run)

    def train(self) -> tuple[UUID, Any]:
        """Run `train`, of a deployment: its id, and what it returned or raised."""
        run = self.run(trialflow.flows.train.train, {"config": self.config.model_dump(mode="json")})
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
    monkeypatch.setattr(trialflow.flows.lifecycle.stop_watch, "LOOK_SECONDS", 0.1)
    # Prefect hands the signal on, in the end, to whoever had it before: here, these tests.
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    with prefect_server.configured():
        yield stage
    signal.signal(signal.SIGTERM, before)


def suspended(flow_run: UUID, stopping: StopHandler) -> None:
    put(flow_run, Suspended(timeout_seconds=3600))
    assert stopping.wait(WAIT)


def suspended_and_resumed(flow_run: UUID, stopping: StopHandler) -> None:
    suspended(flow_run, stopping)
    put(flow_run, Scheduled())


def declared_crashed(flow_run: UUID, stopping: StopHandler) -> None:
    put(flow_run, Crashed())
    assert stopping.wait(WAIT)


def declared_failed(flow_run: UUID, stopping: StopHandler) -> None:
    put(flow_run, Failed())
    assert stopping.wait(WAIT)


def out_of_time_and_suspended(flow_run: UUID, stopping: StopHandler) -> None:
    stopping.ask("time budget")
    assert stopping.wait(WAIT)
    put(flow_run, Suspended(timeout_seconds=3600))


def preempted_and_cancelled(flow_run: UUID, stopping: StopHandler) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    assert stopping.wait(WAIT)
    put(flow_run, Cancelling())


def preempted_and_unable_to_save(flow_run: UUID, stopping: StopHandler) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    assert stopping.wait(WAIT)
    raise StorageError("503 SlowDown")


@pytest.mark.parametrize(
    ("happens", "end"),
    [
        (suspended, "Suspended"),
        (suspended_and_resumed, "Scheduled"),
        (declared_crashed, "Crashed"),
        (declared_failed, "Failed"),
        (out_of_time_and_suspended, "Suspended"),
        (preempted_and_cancelled, "Cancelled"),
        (preempted_and_unable_to_save, "AwaitingRetry"),
    ],
)
def test_the_state_is_true(
    stage: Stage, happens: Callable[[UUID, StopHandler], None], end: str
) -> None:
    """A run that has more to train is never Completed, and what others decided stays decided."""
    stage.act = happens
    run, came_of_it = stage.train()
    assert not isinstance(came_of_it, TrialResult)
    assert state_of(run) == end


def test_signals_and_prefect_are_as_they_were(stage: Stage) -> None:
    """After a run, whoever had the signals before has them again."""
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    stage.act = preempted_and_cancelled
    stage.train()
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


@flow(name="pipeline")
def pipeline(config: dict[str, Any]) -> None:
    """Trains, and goes on."""
    trialflow.flows.train.train(config)
    go_on()


@task(name="go-on")
def go_on() -> None:
    raise AssertionError("a flow that is to stop went on")


def test_as_a_subflow_it_is_not_scheduled_again(stage: Stage) -> None:
    """Nobody would run it: SIGTERM ends the flow that has called it as well."""
    stage.act = lambda run, stopping: (
        os.kill(os.getpid(), signal.SIGTERM),
        stopping.wait(WAIT),
    )[-1]  # type: ignore[assignment, return-value]
    parent = stage.run(pipeline, {"config": stage.config.model_dump(mode="json")})
    with pytest.raises(TerminationSignal):
        stage.execute(pipeline, parent)
    assert stage.trains is not None
    assert {state_of(parent), state_of(stage.trains)} == {"Crashed"}


def test_as_a_subflow_it_is_suspended_with_its_parent(stage: Stage) -> None:
    """It saves and ends; the parent does not go on, and stays Suspended."""
    parent = stage.run(pipeline, {"config": stage.config.model_dump(mode="json")})

    def suspend_the_parent(flow_run: UUID, stopping: StopHandler) -> None:
        suspended(parent, stopping)

    stage.act = suspend_the_parent
    with pytest.raises(Pause):
        stage.execute(pipeline, parent)
    assert state_of(parent) == "Suspended"


def test_the_time_budget_needs_no_server(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that keeps the run waiting does not keep it from seeing that its time is over."""
    asked: list[str] = []

    def out_of_time(flow_run: UUID, stopping: StopHandler) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                trialflow.flows.lifecycle.stop_watch.StopWatch,
                "_look",
                lambda self: stopping.wait(WAIT),
            )
            assert stopping.wait(WAIT)
            asked.append(str(stopping.request))

    stage.act = out_of_time
    stage.config = stage.config.model_copy(
        update={"stopping": stage.config.stopping.model_copy(update={"time_budget_seconds": 0.5})}
    )
    run, result = stage.train()
    assert asked == ["time budget (0.5 s are over)"]
    assert state_of(run) == "Completed"
    assert isinstance(result, TrialResult)
