"""The flow `retrain` with real ranks."""

from __future__ import annotations

import os
import signal
import uuid as uuids
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from tests.support.flow import train
from tests.support.prefect import ROOT, PrefectServer
from tests.support.processes import descendants, wait_until_gone
from tests.support.slots import lines, toy_config
from tests.support.waiting import WAIT_SECONDS, ask, until
from tests.support.ways_to_stop import python_process
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.models.registry import Registry

pytestmark = [pytest.mark.slots, pytest.mark.server]


def experiment(here: Path, run: str, batches: int, **changes: Any) -> ExperimentConfig:
    """An experiment on one rank, which records what it does in the folder `run`."""
    (here / run).mkdir(exist_ok=True)
    retraining = {"model": "toy", **changes.pop("retraining", {})}
    hyperparameters = {"record": str(here / run), **changes.pop("hyperparameters", {})}
    return toy_config(
        here, batches, entrypoint="fresh_trials:Fresh", hyperparameters=hyperparameters,
        perform_initial_validation=True, checkpoint_policy="none", retraining=retraining,
        **{"resources": {"slots_per_trial": 1}, "data": {"validation_samples": 12}, **changes},
    )  # fmt: skip


def retrain(config: ExperimentConfig, data: dict[str, Any] | None = None) -> Any:
    from trialflow.flows.retrain import retrain as flow
    from trialflow.flows.server.embedded_server import flush

    try:
        return flow(config, data)
    finally:
        flush()


def validations(here: Path, run: str) -> list[float]:
    """The validation losses of a run's challenger."""
    hooks = lines(here / run, "hooks", 0)
    return [line["metrics"]["loss"] for line in hooks if line["hook"] == "on_validation_end"]


@pytest.mark.long
def test_two_retrainings(here: Path) -> None:
    """The champion is validated on the second run's data. A challenger that starts from its
    weights has the same loss before its first batch, and a better one after training."""
    first = retrain(experiment(here, "first", 4))
    assert (first.promoted, first.champion, first.challenger) == (True, None, 1)
    fresh = {"validation_samples": "{{ 56 + timedelta(days=4).days }}"}
    config = experiment(here, "second", 16, data=fresh, retraining={"start": "warm"})
    second = retrain(config)
    assert second.data == {"validation_samples": "60"}
    before, after = validations(here, "second")
    assert second.champion_value == before != first.challenger_value
    assert second.challenger_value == after
    assert (second.promoted, second.champion, second.challenger) == (after < before, 1, 2)
    assert second.promoted
    assert [line[0] for line in lines(here / "second", "samples", 0)] == list(range(16))


@pytest.mark.long
def test_a_champion_of_two_slots_is_validated_on_one(here: Path) -> None:
    """Under ZeRO-3, its metrics are those of its own validation; a challenger continues its whole
    state."""
    config = experiment(
        here, "source", 4, resources={"slots_per_trial": 2}, hyperparameters={"zero_stage": 3}
    )
    source = train(config)
    store = CheckpointStore(config.checkpoint_storage.url)
    registry = Registry(store)
    version = registry.register(
        "toy", store.open(source.checkpoint_uuid), metric="loss", smaller_is_better=True, value=None
    )
    registry.promote("toy", version.number)
    result = retrain(
        experiment(
            here, "own", 4, hyperparameters={"zero_stage": 3}, retraining={"start": "continue"}
        )
    )
    saved = source.validation_metrics["loss"]
    assert result.champion_value == pytest.approx(saved, rel=1e-5)
    assert validations(here, "own")[0] == pytest.approx(saved, rel=1e-5)
    assert (result.champion, result.challenger) == (1, 2)


@pytest.mark.long
def test_a_killed_driver(here: Path, prefect_server: PrefectServer) -> None:
    """After SIGKILL during training, no rank is left. The same flow run, run again, continues from
    the last checkpoint without waiting, and promotes once."""
    retrain(experiment(here, "first", 4))
    waiting = {"do": "wait", "at_batch": 6, "wait_for": str(here / "go")}
    config = experiment(
        here, "second", 12, hyperparameters=waiting, scheduling_unit=2,
        min_checkpoint_period={"batches": 2}, data={"validation_samples": "{{ 60 }}"},
        retraining={"start": "warm"},
    )  # fmt: skip
    run = create_run(prefect_server, config)
    store = CheckpointStore(config.checkpoint_storage.url)
    firsts = {manifest.uuid for manifest in store.list()}
    with engine(prefect_server, here, run) as driver:
        until(lambda: len(lines(here / "second", "samples", 0)) == 6, "the sixth batch")
        until(lambda: {each.uuid for each in store.list()} - firsts, "a checkpoint of the second")
        ranks = descendants(driver)
        os.kill(driver, signal.SIGKILL)
        assert wait_until_gone(ranks, WAIT_SECONDS) == []
    (here / "go").touch()
    ask(
        prefect_server, f"flow_runs/{run}/set_state",
        {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}, "force": True},
    )  # fmt: skip
    with engine(prefect_server, here, run):
        until(lambda: state(prefect_server, run) in ("Completed", "Failed", "Crashed"), "an end")
    assert state(prefect_server, run) == "Completed"
    registry = Registry(store)
    assert [version.number for version in registry.versions("toy")] == [1, 2]
    assert registry.version("toy", 2).batches_trained == 12
    trained = [line[0] for line in lines(here / "second", "samples", 0)]
    assert trained[:6] == [0, 1, 2, 3, 4, 5]
    assert trained[6] > 0
    assert trained[6:] == list(range(trained[6], 12))
    assert [move.run for move in registry.moves("toy")][1:] == [run]


def create_run(server: PrefectServer, config: ExperimentConfig) -> str:
    """Create a flow run of a new deployment, as for a container. Returns its id."""
    name = f"retrain-{uuids.uuid4().hex[:8]}"
    pool = ask(server, "work_pools/", {"name": name, "type": "process"})
    flow = ask(server, "flows/", {"name": "retrain"})
    folder = {"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}
    deployment = ask(server, "deployments/",
        {
            "name": name, "flow_id": flow["id"], "entrypoint": "trialflow.flows.retrain.retrain",
            "work_pool_name": pool["name"], "pull_steps": [folder],
            "enforce_parameter_schema": False,
        },
    )  # fmt: skip
    now = datetime.now(timezone.utc).isoformat()
    run = ask(
        server, f"deployments/{deployment['id']}/create_flow_run",
        {
            "parameters": {"config": config.model_dump(mode="json")},
            "state": {"type": "SCHEDULED", "state_details": {"scheduled_time": now}},
        },
    )  # fmt: skip
    return str(run["id"])


def engine(server: PrefectServer, here: Path, run: str) -> Any:
    """A process of Prefect's engine that executes the flow run."""
    variables = {"TRIALFLOW_HOME": str(here / "home"), "PREFECT__FLOW_RUN_ID": run}
    return python_process(server, here, "-m", "prefect.engine", **variables)


def state(server: PrefectServer, run: str) -> str:
    name: str = ask(server, f"flow_runs/{run}")["state_name"]
    return name
