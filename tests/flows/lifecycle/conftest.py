"""A stage for flows: real ones on a real server, with a stand-in for training."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import Abort, CancelledRun, Pause, TerminationSignal
from prefect.flow_engine import run_flow
from prefect.logging.loggers import flow_run_logger

import trialflow.flows.lifecycle.stop_monitor
import trialflow.flows.train
from tests.support.prefect import PrefectServer
from tests.support.slots import toy_config
from trial_core.driver.run import Given
from trial_core.schedule.stop_requests import StopHandler
from trialflow.flows.server.embedded_server import flush
from trialflow.flows.train import TrialResult

TIMEOUT_SECONDS = 30.0


def set_state(flow_run: UUID, state: Any) -> None:
    """As a person or an automation does."""
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run, state, force=True)


def state_of(flow_run: UUID) -> str:
    return str(whole_state_of(flow_run).name)


def whole_state_of(flow_run: UUID) -> State[Any]:
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(flow_run).state
    assert state is not None
    return state


class Stage:
    """Runs flows of a deployment in this process, without training.

    Attributes:
        act: called in place of training, with the flow run's id.
        training: the flow run that trained.
    """

    def __init__(self, server: PrefectServer, folder: Path) -> None:
        self.server = server
        self.config = toy_config(folder, resources={"slots_per_trial": 2, "preload": False})
        self.training: UUID | None = None
        self.act: Callable[[UUID, StopHandler], None] = lambda flow_run, stopping: None

    def train_trial(self, config: Any, trial: str, given: Given) -> TrialResult:
        """The stand-in for `trialflow.flows.train.train_trial`."""
        self.training = UUID(str(runtime.flow_run.id))
        self.act(self.training, given.stopping)
        return TrialResult(
            trial,
            batches_trained=10,
            stopped_early=True,
            checkpoint_uuid="4f0c21aa",
            checkpoint_at=10,
            trial_stop_reason="it is enough",
        )

    def create_run(self, what: Any, **fields: Any) -> UUID:
        """A deployment's flow run, pending on a worker."""
        created = self.server.query("flows/", {"name": what.name})
        deployment = self.server.query("deployments/", {"name": "here", "flow_id": created["id"]})
        run = self.server.query(
            f"deployments/{deployment['id']}/create_flow_run",
            {
                "parameters": {"config": self.config.model_dump(mode="json")},
                "state": {"type": "PENDING"},
                **fields,
            },
        )
        return UUID(run["id"])

    def execute(self, what: Any, run: UUID) -> Any:
        """As a worker's process does."""
        with get_client(sync_client=True) as client:
            flow_run = client.read_flow_run(run)
        return run_flow(what, flow_run=flow_run, error_logger=flow_run_logger(flow_run))

    def trial_of(self, run: UUID) -> str:
        """The trial of a run of `train`."""
        with get_client(sync_client=True) as client:
            return str(client.read_flow_run(run).name)

    def log(self, run: UUID) -> list[tuple[int, str]]:
        """The flow run's log on the server: level and text of each line."""
        flush()
        wanted = {"logs": {"flow_run_id": {"any_": [str(run)]}}, "sort": "TIMESTAMP_ASC"}
        return [
            (line["level"], line["message"]) for line in self.server.query("logs/filter", wanted)
        ]

    def set_stopping(self, **settings: Any) -> None:
        """Change the experiment's section `stopping`."""
        stopping = self.config.stopping.model_copy(update=settings)
        self.config = self.config.model_copy(update={"stopping": stopping})

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
    monkeypatch.setattr(trialflow.flows.lifecycle.stop_monitor, "POLL_SECONDS", 0.2)
    # Prefect forwards the signal to the previous handler, which here is pytest's.
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    with prefect_server.configured():
        yield stage
    signal.signal(signal.SIGTERM, before)
