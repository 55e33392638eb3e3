"""The flow `evaluate`: a checkpoint's metrics, on another number of slots."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.cli import write_experiment
from tests.support.flow import one_slot, stages, train
from tests.support.json_types import check_json
from tests.support.manifests import commit_files, new_manifest
from tests.support.prefect import PrefectServer
from tests.support.slots import lines
from tests.support.storage_clock import shift_clock
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.retention.claims import claims
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    ModelNotFound,
    StorageError,
)
from trial_core.schedule.stop_requests import StopHandler
from trialflow.deployments.cli.console import REFUSED
from trialflow.deployments.cli.main import main
from trialflow.flows import evaluate as evaluate_flow
from trialflow.flows.server.prefect_settings import prepare_prefect

pytestmark = [pytest.mark.slots, pytest.mark.server]


def trained(here: Path) -> tuple[ExperimentConfig, Any]:
    """The experiment and result of 8 batches on one slot, saved after 4 and 8."""
    config: ExperimentConfig = one_slot(
        here, 8, hyperparameters={"record": str(here), "zero_stage": 3},
        min_validation_period={"batches": 4},
    )  # fmt: skip
    return config, train(config)


def evaluate(config: ExperimentConfig, checkpoint: str | None = None) -> Any:
    from trialflow.flows.evaluate import evaluate as flow
    from trialflow.flows.server.embedded_server import flush

    try:
        return flow(config, checkpoint)
    finally:
        flush()


def damage(config: ExperimentConfig, uuid: str) -> None:
    """Delete a file of a checkpoint that it shares with no other."""
    store = CheckpointStore(config.checkpoint_storage.url)
    files = store.open(uuid).files
    weights = next(file for file in files if file.path.endswith("_model_states.pt"))
    assert not weights.stored_at
    store.storage.remove(weights.key(uuid))


def test_the_newest_checkpoint_on_other_slots(
    prefect_server: PrefectServer, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`trialflow evaluate`: a checkpoint of one slot gives the same metrics on two.

    As JSON and as a table on the run's page. Nothing is trained, and no claim is left. Other
    hyperparameters than the checkpoint's are told.
    """
    prepare_prefect()  # as the command does: one warm process forks the ranks of both runs
    config, result = trained(here)
    storage = config.checkpoint_storage.url
    path = write_experiment(
        here, hyperparameters={"record": str(here), "zero_stage": 3, "unused": 1},
        resources={"slots_per_trial": 2}, checkpoint_storage=storage,
    )  # fmt: skip
    capsys.readouterr()
    assert main(["evaluate", str(path), "--json"]) == 0
    printed = check_json(json.loads(capsys.readouterr().out))
    assert printed["checkpoint"] == result.checkpoint_uuid
    assert (printed["trial"], printed["batches_trained"]) == (result.trial, 8)
    (change,) = printed["changes"]
    assert change.endswith("which count: hyperparameters.unused 1, which is new")
    assert printed["metrics"] == pytest.approx(result.validation_metrics, rel=1e-5)
    assert [line[0] for line in lines(here, "samples", 0)] == list(range(8))
    assert claims(CheckpointStore(storage)) == []

    last = "callbacks on_validation_end @8"
    names = [stage.name for stage in stages(prefect_server, printed["flow_run_id"], last)]
    assert names == ["build-trial", "fetch-checkpoint @8", "build-loaders @0", "validate @8", last]
    (artifact,) = prefect_server.query(
        "artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [printed["flow_run_id"]]}}}
    )
    assert (artifact["type"], artifact["key"]) == ("table", "evaluation-toy")
    assert {row["metric"] for row in json.loads(artifact["data"])} == set(printed["metrics"])


def test_a_machine_with_a_wrong_clock_evaluates_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prune on another machine may take its claim for a forgotten one."""
    from trialflow.flows.evaluate import evaluate_checkpoint

    config, stopping = one_slot(here, 8), StopHandler(25)
    storage = CheckpointStore(config.checkpoint_storage.url).storage
    shift_clock(monkeypatch, storage, timedelta(days=40))
    with pytest.raises(StorageError, match="set the wrong one"):
        evaluate_checkpoint(config, None, "unique", stopping, {})


def test_a_checkpoint_of_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is validated with its own hyperparameters, as a command and as a deployment."""

    class Launched(Exception):
        pass

    def launch(run: Any, placement: Any) -> None:
        raise Launched(run.run.config)

    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(evaluate_flow, "launch_slots", launch)
    for name in ("get_run_logger", "logger_finder"):
        monkeypatch.setattr(evaluate_flow, name, lambda: None)
    storage, ranges = str(tmp_path / "storage"), {"lr": {"type": "log", "minval": -4, "maxval": -1}}
    path = write_experiment(
        tmp_path, hyperparameters=ranges, checkpoint_storage=storage,
        searcher={
            "name": "random", "metric": "loss", "max_trials": 2, "max_length": {"batches": 8},
        },
    )  # fmt: skip
    saved = commit_files(CheckpointStore(storage), experiment="toy", hyperparameters={"lr": 0.1})
    given = {"config": yaml.safe_load(path.read_text()), "checkpoint": saved.uuid}
    config = evaluate_flow.evaluate.validate_parameters(given)["config"]
    with pytest.raises(Launched) as launched:
        evaluate_flow.evaluate_checkpoint(config, saved.uuid, "unique", StopHandler(25), {})
    (ran,) = launched.value.args
    assert (ran.searcher.name, ran.hyperparameters) == ("single", {"lr": 0.1})
    assert main(["evaluate", str(path), "--set", "hyperparameters.width=7"]) == REFUSED
    assert "validated with its own hyperparameters" in capsys.readouterr().err


@pytest.mark.long
def test_a_damaged_checkpoint(here: Path) -> None:
    """The newest one gives way to an older one; a given one does not."""
    config, _ = trained(here)
    older, newer = CheckpointStore(config.checkpoint_storage.url).list()
    damage(config, newer.uuid)
    assert evaluate(config).checkpoint_uuid == older.uuid
    with pytest.raises(CheckpointDamaged, match="the checkpoint is damaged"):
        evaluate(config, newer.uuid[:8])
    damage(config, older.uuid)
    with pytest.raises(CheckpointDamaged, match="every checkpoint of the trial"):
        evaluate(config)


def test_nothing_to_evaluate(here: Path) -> None:
    """The error comes before any rank is launched."""
    config = one_slot(here, 4)
    with pytest.raises(CheckpointNotFound, match="of experiment 'toy': train it first"):
        evaluate(config)
    with pytest.raises(CheckpointNotFound, match="abcd"):
        evaluate(config, "abcd")
    with pytest.raises(ModelNotFound, match="there is no model 'gpt'"):
        evaluate(config, "champion:gpt")


def test_a_checkpoint_that_is_deleted_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several an older one is validated; one that was asked for is missing."""
    newest, older = new_manifest(), new_manifest()
    launch: Any = None

    def fetch(launch: Any, point: ResumePoint) -> str | None:
        if point.checkpoint is newest:
            raise CheckpointNotFound("just deleted")
        return None

    monkeypatch.setattr(evaluate_flow, "fetch", fetch)
    monkeypatch.setattr(evaluate_flow, "require_convertible", lambda *_: None)
    choose = evaluate_flow._fetch_first_intact
    assert choose(launch, [newest, older], None) is older
    with pytest.raises(CheckpointNotFound):
        choose(launch, [newest], newest.uuid)
