"""Runs of the flow `retrain` on a real Prefect server and a real registry, without ranks."""

from __future__ import annotations

import shutil
import threading
import uuid as uuids
from collections.abc import Callable, Mapping
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
from tests.support.slots import TOY, toy_config
from tests.support.waiting import WAIT_SECONDS, ask, until
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.upload import upload_files
from trial_core.config import ExperimentConfig
from trial_core.driver.run import Given
from trial_core.models.records import Move
from trial_core.models.registry import Registry
from trial_core.schedule.sequencer import Progress
from trial_core.schedule.stop_requests import StopHandler
from trialflow.flows.evaluate import EvaluateResult
from trialflow.flows.server.embedded_server import flush
from trialflow.flows.train import TrialResult


class Killed(BaseException):
    """Stands for a SIGKILL at a moment that a test chooses."""


class RetrainHarness:
    """A model, and runs of its retraining in this process with fake training and validation.

    Args:
        storage: the checkpoint storage; default: below `folder`.

    Attributes:
        experiment: fields of the experiment.
        challenger_loss: metric of the challenger's only checkpoint; None: it is not validated.
        champion_loss: metric of the champion on the run's data.
        on_train: called in place of training, after the checkpoint is saved.
        finishes_despite_stop: whether training ends normally although a stop is requested.
        validation_errors: raised by successive validations before one succeeds.
        trained, validated: configurations trained and checkpoints validated, in order.
    """

    def __init__(
        self, server: PrefectServer, folder: Path, storage: Mapping[str, Any] | None = None
    ) -> None:
        self.server, self.folder = server, folder
        self.model = f"toy-{uuids.uuid4().hex[:8]}"
        storage = storage or {"url": f"file://{folder}/checkpoints"}
        self.experiment: dict[str, Any] = {"checkpoint_storage": storage}
        self.store = CheckpointStore(storage["url"], storage.get("options"))
        self.registry = Registry(self.store)
        self.challenger_loss: float | None = 0.5
        self.champion_loss = 0.7
        self.on_train: Callable[[StopHandler], object] = lambda stopping: None
        self.finishes_despite_stop = False
        self.validation_errors: list[Exception] = []
        self.trained: list[ExperimentConfig] = []
        self.validated: list[str] = []

    def replace_ranks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the parts of the flow that need ranks."""
        monkeypatch.setattr(trialflow.flows.retrain, "train_trial", self._train)
        monkeypatch.setattr(trialflow.flows.retrain, "evaluate_checkpoint", self._evaluate)

    def _train(self, config: Any, trial: str, given: Given) -> TrialResult:
        stopping = given.stopping
        self.trained.append(config)
        if not self.store.list(trial):
            self.save_checkpoint(trial, self.challenger_loss)
        self.on_train(stopping)
        is_early = stopping.request is not None and not self.finishes_despite_stop
        return TrialResult(trial, batches_trained=7, stopped_early=is_early)

    def _evaluate(
        self, config: Any, checkpoint: str, unique: str, stopping: Any, devices: Any
    ) -> EvaluateResult:
        self.validated.append(checkpoint)
        if self.validation_errors:
            raise self.validation_errors.pop(0)
        manifest = self.store.verify(checkpoint)
        metrics = {"loss": self.champion_loss, "mean_index": 1.5}
        return EvaluateResult(checkpoint, manifest.trial, 7, metrics)

    # ---------------------------------------------------------------- checkpoints and versions

    def save_checkpoint(self, trial: str, loss: float | None) -> Manifest:
        """Commit a checkpoint with files, validated unless `loss` is None."""
        uuid = str(uuids.uuid4())
        files = upload_files(self.store, uuid, stage(self.folder / "staged" / uuid, FILES), 0)
        manifest = new_manifest(
            7, uuid=uuid, trial=trial, experiment=self.model, files=files,
            progress=Progress(7, validated_at=None if loss is None else 7),
            metrics={"validation": {"loss": 9.0 if loss is None else loss}},
        )  # fmt: skip
        self.store.commit(manifest)
        return manifest

    def promote_by_hand(self, loss: float = 0.7) -> int:
        """Promote a new checkpoint, as a person does. Returns the version's number."""
        manifest = self.save_checkpoint(f"by-hand-{uuids.uuid4().hex[:8]}", loss)
        version = self.registry.register(
            self.model, manifest, metric="loss", smaller_is_better=True, value=loss
        )
        self.registry.promote(self.model, version.number, why="by hand")
        return version.number

    def damage(self, uuid: str) -> str:
        """Change a byte of a checkpoint's largest file. Returns the file's path."""
        entry = max(self.store.open(uuid).files, key=lambda file: file.size_bytes)
        path = self.folder / "checkpoints" / "checkpoints" / uuid / entry.path
        data = path.read_bytes()
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        return entry.path

    def write_callbacks(self, text: str) -> Path:
        """Give the experiment a code folder with a module `hooks`. Returns the folder."""
        code = self.folder / "code"
        code.mkdir()
        (code / "hooks.py").write_text(text)
        shutil.copy(TOY / "toy_trial.py", code)
        self.experiment["code"] = str(code)
        return code

    # -------------------------------------------------------------------------------- runs

    def config(self, **retraining: Any) -> ExperimentConfig:
        """The experiment."""
        return toy_config(
            self.folder, name=self.model, retraining={"model": self.model, **retraining},
            **self.experiment,
        )  # fmt: skip

    def create_run(
        self,
        data: Mapping[str, Any] | None = None,
        scheduled_time: datetime | None = None,
        **retraining: Any,
    ) -> UUID:
        """Create a flow run of a deployment, ready for a worker. Returns its id."""
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
        """Execute a flow run as a worker does. Returns the flow's result."""
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(run, Pending(), force=True)
            flow_run = client.read_flow_run(run)
        try:
            return run_flow(trialflow.flows.retrain.retrain, flow_run=flow_run)
        finally:
            flush()

    def run(self, data: Mapping[str, Any] | None = None, **retraining: Any) -> Any:
        """Create and execute a flow run. Returns the flow's result."""
        return self.execute(self.create_run(data, **retraining))

    def execute_in_thread(self, run: UUID) -> Future[Any]:
        """Start `execute` in a thread."""
        future: Future[Any] = Future()

        def work() -> None:
            try:
                future.set_result(self.execute(run))
            except BaseException as error:  # noqa: BLE001 - the thread's top frame: passed on
                future.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return future

    # ----------------------------------------------------------------------------- results

    def champion(self) -> int | None:
        """The number of the champion version."""
        move = self.registry.last_move(self.model)
        return None if move is None else move.champion

    def moves(self) -> list[Move]:
        """All moves of the model's aliases."""
        return self.registry.moves(self.model)

    def state_of(self, run: UUID) -> tuple[str, str]:
        """The name and the message of a flow run's state."""
        state = ask(self.server, f"flow_runs/{run}")["state"]
        return state["name"], state["message"]

    def events(self, at_least: int = 1, prefix: str = "trialflow.model.") -> list[dict[str, Any]]:
        """The events of the model, once the server has recorded that many."""
        model = {"id": [f"trialflow.model.{self.model}"]}
        body = {"filter": {"event": {"prefix": [prefix]}, "resource": model}, "limit": 50}
        found: list[dict[str, Any]] = []

        def are_recorded() -> bool:
            found[:] = ask(self.server, "events/filter", body)["events"]
            return len(found) >= at_least

        until(are_recorded, f"{at_least} events", WAIT_SECONDS, lambda: found)
        return found

    def report(self, run: UUID | str) -> str:
        """The report in the storage."""
        data = self.store.storage.read(f"models/{self.model}/retrainings/{run}/report.md")
        assert data is not None, "there is no report"
        return data.decode()

    def report_artifact(self, run: UUID | str) -> dict[str, Any]:
        """The report on the server."""
        # Prefect may store results of flow runs as artifacts too: those have no type.
        only = {"flow_run_id": {"any_": [str(run)]}, "type": {"any_": ["markdown"]}}
        (artifact,) = ask(self.server, "artifacts/filter", {"artifacts": only})
        return dict(artifact)


def stop_with(stopping: StopHandler, why: Any, detail: str) -> None:
    """Request a stop, and wait until it is seen."""
    stopping.ask(why, detail)
    assert stopping.wait(WAIT_SECONDS)
