"""Retrainings on a real Prefect server and a real registry, in which ranks are stood in for.

What is trained, and how the champion does on the run's data, is what a test says: `Bench`.
"""

from __future__ import annotations

import threading
import time
import uuid as uuids
from collections.abc import Mapping
from concurrent.futures import Future
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.flow_engine import run_flow
from prefect.states import Pending

import trialflow.flows.retrain
from tests.support.manifests import FILES, new_manifest, stage
from tests.support.prefect import PrefectServer
from tests.support.slots import toy_config
from tests.support.waiting import ask
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.models.records import Move
from trial_core.models.registry import Registry
from trial_core.run.sequencer import Progress
from trial_core.run.stop_request import StopHandler
from trial_core.transfer.files import upload_files
from trialflow.flows.evaluate import EvaluateResult
from trialflow.flows.server.embedded import flush
from trialflow.flows.train import TrialResult

RECORD_SECONDS = 30.0


class Killed(BaseException):
    """In place of a SIGKILL, at a moment that a test chooses."""


class Bench:
    """Runs of the flow `retrain` in this process, without ranks.

    Args:
        storage: where checkpoints and the registry are; below `folder` unless given.
        changes: fields of the experiment.

    Attributes:
        loss: of the challenger's only checkpoint; None: it is not validated.
        champion_loss: of the champion on the run's data.
        trained, validated: what was asked for, in order.
        act: called in place of training, once the checkpoint is there.
        failures: what validating raises, one after the other, before it succeeds.
        ends_anyway: whether all is trained, though the run is asked to stop meanwhile.
    """

    def __init__(
        self,
        server: PrefectServer,
        folder: Path,
        storage: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        self.server, self.folder = server, folder
        self.model = f"toy-{uuids.uuid4().hex[:8]}"
        place = storage or {"url": f"file://{folder}/checkpoints"}
        self.changes = {**changes, "checkpoint_storage": place}
        self.store = CheckpointStore(place["url"], place.get("options"))
        self.registry = Registry(self.store)
        self.loss: float | None = 0.5
        self.champion_loss = 0.7
        self.trained: list[ExperimentConfig] = []
        self.validated: list[str] = []
        self.act: Any = lambda stopping: None
        self.failures: list[Exception] = []
        self.ends_anyway = False

    def config(self, **retraining: Any) -> ExperimentConfig:
        return toy_config(
            self.folder, name=self.model, retraining={"model": self.model, **retraining},
            **self.changes,
        )  # fmt: skip

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(trialflow.flows.retrain, "train_trial", self._train)
        monkeypatch.setattr(trialflow.flows.retrain, "evaluate_checkpoint", self._evaluate)

    def damage(self, uuid: str) -> str:
        """Change a byte of a checkpoint's largest file, whose path is returned."""
        entry = max(self.store.open(uuid).files, key=lambda file: file.size_bytes)
        path = self.folder / "checkpoints" / "checkpoints" / uuid / entry.path
        data = path.read_bytes()
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        return entry.path

    def _train(self, config: Any, trial: str, stopping: StopHandler, devices: Any) -> TrialResult:
        self.trained.append(config)
        if not self.store.list(trial):
            self.save(trial, self.loss)
        self.act(stopping)
        is_early = stopping.request is not None and not self.ends_anyway
        return TrialResult(trial, batches_trained=7, stopped_early=is_early)

    def _evaluate(
        self, config: Any, checkpoint: str, unique: str, stopping: Any, devices: Any
    ) -> EvaluateResult:
        self.validated.append(checkpoint)
        if self.failures:
            raise self.failures.pop(0)
        manifest = self.store.verify(checkpoint)
        metrics = {"loss": self.champion_loss, "mean_index": 1.5}
        return EvaluateResult(checkpoint, manifest.trial, 7, metrics)

    def save(self, trial: str, loss: float | None) -> Manifest:
        """A checkpoint with files, validated unless `loss` is None."""
        uuid = str(uuids.uuid4())
        files = upload_files(self.store, uuid, stage(self.folder / "staged" / uuid, FILES), 0)
        manifest = new_manifest(
            7, uuid=uuid, trial=trial, experiment=self.model, files=files,
            progress=Progress(7, validated_at=None if loss is None else 7),
            metrics={"validation": {"loss": 9.0 if loss is None else loss}},
        )  # fmt: skip
        self.store.commit(manifest)
        return manifest

    def promote(self, loss: float = 0.7) -> int:
        """Somebody makes a checkpoint the champion; the version's number."""
        manifest = self.save(f"by-hand-{uuids.uuid4().hex[:8]}", loss)
        version = self.registry.register(
            self.model, manifest, metric="loss", smaller_is_better=True, value=loss
        )
        self.registry.promote(self.model, version.number, why="by hand")
        return version.number

    # ------------------------------------------------------------------------------- runs

    def create(
        self,
        data: Mapping[str, Any] | None = None,
        scheduled_time: datetime | None = None,
        **retraining: Any,
    ) -> UUID:
        """The id of a flow run that a worker would now execute."""
        created = ask(self.server, "flows/", {"name": "retrain"})
        deployment = ask(
            self.server, "deployments/", {"name": self.model, "flow_id": created["id"]}
        )
        config = self.config(**retraining).model_dump(mode="json")
        at = (scheduled_time or datetime.now(timezone.utc)).isoformat()
        state = {"type": "SCHEDULED", "state_details": {"scheduled_time": at}}
        run = ask(
            self.server,
            f"deployments/{deployment['id']}/create_flow_run",
            {"parameters": {"config": config, "data": data}, "state": state},
        )
        return UUID(run["id"])

    def execute(self, run: UUID) -> Any:
        """As a worker's process does it; what the flow returned or raised."""
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(run, Pending(), force=True)
            flow_run = client.read_flow_run(run)
        try:
            return run_flow(trialflow.flows.retrain.retrain, flow_run=flow_run)
        finally:
            flush()

    def run(self, data: Mapping[str, Any] | None = None, **retraining: Any) -> Any:
        """A run of its own: what the flow returned."""
        return self.execute(self.create(data, **retraining))

    def beside(self, run: UUID) -> Future[Any]:
        """As `execute`, in a thread of its own."""
        future: Future[Any] = Future()

        def work() -> None:
            try:
                future.set_result(self.execute(run))
            except BaseException as error:  # noqa: BLE001 - the thread's top frame: handed on
                future.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return future

    # ------------------------------------------------------------------- what came of them

    def champion(self) -> int | None:
        state = self.registry.state(self.model)
        return None if state is None else state.champion

    def moves(self) -> list[Move]:
        return self.registry.moves(self.model)

    def state(self, run: UUID) -> tuple[str, str]:
        """The name and the message of a flow run's state."""
        state = ask(self.server, f"flow_runs/{run}")["state"]
        return state["name"], state["message"]

    def events(self, at_least: int = 1) -> list[dict[str, Any]]:
        """The events of the model; waits until the server has recorded so many."""
        deadline = time.monotonic() + RECORD_SECONDS
        resource = f"trialflow.model.{self.model}"
        while True:
            found = ask(
                self.server,
                "events/filter",
                {"filter": {"resource": {"id": [resource]}}, "limit": 50},
            )["events"]
            if len(found) >= at_least:
                return list(found)
            assert time.monotonic() < deadline, f"events recorded: {found}"
            time.sleep(0.1)

    def report(self, run: UUID | str) -> str:
        """What lies beside the plan."""
        data = self.store.storage.read(f"models/{self.model}/retrainings/{run}/report.md")
        assert data is not None, "there is no report"
        return data.decode()
