"""The flow `prune`, and the prunes after a run's commits, on a real server."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import flow

from tests.support.flow import stages
from tests.support.manifests import leave_unfinished_upload, new_manifest
from tests.support.prefect import PrefectServer
from tests.support.slots import toy_config
from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.retention.protections import pin
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.driver.run import Launch, Run
from trial_core.driver.uploads import Pruning
from trial_core.errors import ConfigError, StorageError
from trial_core.schedule.sequencer import Progress
from trialflow.flows.lifecycle.run_log import logger_finder
from trialflow.tasks.stages import as_prefect_task

pytestmark = pytest.mark.server

TRIAL = "toy-0000beef"
PREFECT_FILE = "deployments/prefect.yaml"


def experiment(here: Path, **rules: Any) -> ExperimentConfig:
    return toy_config(here, checkpoint_storage={"url": f"file://{here}/storage", **rules})


def commit(config: ExperimentConfig, *batches: int) -> list[Manifest]:
    """Commit checkpoints without files, of a trial whose loss grows."""
    store = CheckpointStore(config.checkpoint_storage.url)
    manifests = [
        new_manifest(
            count, trial=TRIAL, experiment=config.name,
            progress=Progress(count, validated_at=count),
            metrics={"validation": {"loss": count / 10}},
        )
        for count in batches
    ]  # fmt: skip
    for manifest in manifests:
        store.commit(manifest)
    return manifests


def prune(config: ExperimentConfig, **parameters: Any) -> tuple[Any, str]:
    """Run the flow; its result and the flow run's id."""
    from trialflow.flows.prune import prune as prune_flow
    from trialflow.flows.server.embedded_server import flush

    ids: list[str] = []
    watched = prune_flow.with_options(on_running=[lambda flow, run, state: ids.append(str(run.id))])
    try:
        return watched(config, **parameters), ids[0]
    finally:
        flush()


def listed(config: ExperimentConfig) -> list[Manifest]:
    return CheckpointStore(config.checkpoint_storage.url).list()


def test_a_dry_run_deletes_nothing(prefect_server: PrefectServer, here: Path) -> None:
    """It is the default, and shows each decision and its reason as an artifact."""
    config = experiment(here, save_trial_latest=1)
    best, old, new = commit(config, 7, 11, 13)
    result, flow_run_id = prune(config)
    assert (result.kept, result.deleted) == ((best.uuid, new.uuid), (old.uuid,))
    assert result.is_dry_run
    assert listed(config) == [best, old, new]
    (artifact,) = prefect_server.query(
        "artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [flow_run_id]}}}
    )
    assert (artifact["type"], artifact["key"]) == ("table", "prune-toy")
    assert artifact["description"].startswith("Would delete 1 of 3 checkpoints")
    rows = json.loads(artifact["data"])
    assert [(row["uuid"], row["action"], row["why"]) for row in rows] == [
        (best.uuid, "keep", "best of its trial (loss 0.7)"),
        (old.uuid, "delete", "2nd latest, and 1 is kept; 2nd best of its trial (loss 1.1), and 1 "
         "is kept"),
        (new.uuid, "keep", "latest of its trial"),
    ]  # fmt: skip
    names = [stage.name for stage in stages(prefect_server, flow_run_id, "plan-sweep")]
    assert names == ["plan-prune", "plan-sweep"]


def test_a_prune_deletes_unpinned_checkpoints(prefect_server: PrefectServer, here: Path) -> None:
    """In a separate stage, which a dry run does not have."""
    config = experiment(here, save_trial_latest=1)
    best, pinned, old, new = commit(config, 7, 9, 11, 13)
    pin(CheckpointStore(config.checkpoint_storage.url), pinned.uuid)
    result, flow_run_id = prune(config, dry_run=False)
    assert listed(config) == [best, pinned, new]
    assert (result.deleted, result.is_dry_run) == ((old.uuid,), False)
    names = [stage.name for stage in stages(prefect_server, flow_run_id, "delete-checkpoints")]
    assert names == ["plan-prune", "plan-sweep", "delete-checkpoints"]


@pytest.mark.long
def test_leftovers_are_swept(prefect_server: PrefectServer, here: Path) -> None:
    """A dry run shows them as an artifact. An experiment without rules has leftovers too."""
    config = experiment(here)
    manifests = commit(config, 7)
    store = CheckpointStore(config.checkpoint_storage.url)
    lost = leave_unfinished_upload(store, "toy-2")
    dry, flow_run_id = prune(config, leftovers_only=True)
    assert (dry.swept, dry.freed_bytes, dry.is_dry_run) == ((lost,), 4, True)
    (artifact,) = prefect_server.query(
        "artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [flow_run_id]}}}
    )
    assert artifact["description"].startswith("Would delete 1 of 1 uploads that were never")
    (row,) = json.loads(artifact["data"])
    assert (row["uuid"], row["trial"], row["action"]) == (lost, "toy-2", "delete")
    done, flow_run_id = prune(config, dry_run=False, leftovers_only=True)
    assert (done.swept, done.deleted, done.freed_bytes) == ((lost,), (), 4)
    assert listed(config) == manifests
    names = [stage.name for stage in stages(prefect_server, flow_run_id, "sweep-leftovers")]
    assert names == ["plan-sweep", "sweep-leftovers"]


def test_an_experiment_without_rules_is_refused(here: Path) -> None:
    """It keeps all checkpoints, so there is nothing to prune."""
    with pytest.raises(ConfigError, match="checkpoint_storage has no rules"):
        prune(experiment(here))


def in_a_run(config: ExperimentConfig, act: Any) -> str:
    """Call `act` with a run's `Pruning` inside a flow run; the flow run's id."""
    from trialflow.flows.server.embedded_server import flush

    store = CheckpointStore(config.checkpoint_storage.url)
    ids: list[str] = []

    @flow(name="a-run", on_running=[lambda flow, run, state: ids.append(str(run.id))])
    def a_run() -> None:
        run = Run(config, TRIAL, Path(), store, find_logger=logger_finder())
        run.execute = as_prefect_task
        pruning = Pruning(Launch(run))
        act(pruning)
        pruning.finish()

    try:
        a_run()
        return ids[0]
    finally:
        flush()


def test_a_run_prunes_after_a_commit(prefect_server: PrefectServer, here: Path) -> None:
    """The stage's name says after which batch."""
    config = experiment(here, save_trial_latest=1)
    best, _, new = commit(config, 7, 11, 13)
    flow_run_id = in_a_run(config, lambda pruning: pruning.start(13))
    assert listed(config) == [best, new]
    (stage,) = stages(prefect_server, flow_run_id, "checkpoint-prune @13")
    assert stage.state == "Completed"


def test_a_run_without_rules_does_not_prune(prefect_server: PrefectServer, here: Path) -> None:
    """It has no such stage."""
    config = experiment(here)
    manifests = commit(config, 7, 11, 13)
    flow_run_id = in_a_run(config, lambda pruning: pruning.start(13))
    assert listed(config) == manifests
    assert stages(prefect_server, flow_run_id) == []


def test_commits_during_a_prune_cause_one_more_prune(
    prefect_server: PrefectServer, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many they are. A commit never waits for the prune in progress."""
    config = experiment(here, save_trial_latest=1, save_trial_best=0)
    commit(config, 7, 11)
    began, may_continue = threading.Event(), threading.Event()
    list_ = CheckpointStore.list

    def slow(store: CheckpointStore, trial: str | None = None) -> list[Manifest]:
        found = list_(store, trial)
        began.set()
        may_continue.wait(60)
        return found

    def act(pruning: Pruning) -> None:
        pruning.start(11)
        began.wait(60)
        commit(config, 13, 17)
        pruning.start(13)
        pruning.start(17)
        may_continue.set()

    monkeypatch.setattr(CheckpointStore, "list", slow)
    flow_run_id = in_a_run(config, act)
    assert [each.progress.batches_trained for each in listed(config)] == [17]
    names = [stage.name for stage in stages(prefect_server, flow_run_id, "checkpoint-prune @17")]
    assert names == ["checkpoint-prune @11", "checkpoint-prune @17"]


def test_a_failed_prune_is_a_warning(
    prefect_server: PrefectServer, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run continues, and its log names the cause."""
    config = experiment(here, save_trial_latest=1)

    def broken(store: CheckpointStore, trial: str | None = None) -> list[Manifest]:
        raise StorageError("the storage broke down")

    monkeypatch.setattr(CheckpointStore, "list", broken)
    flow_run_id = in_a_run(config, lambda pruning: pruning.start(13))
    (stage,) = stages(prefect_server, flow_run_id, "checkpoint-prune @13")
    assert stage.state == "Completed"
    logs = prefect_server.query(
        "logs/filter", {"logs": {"flow_run_id": {"any_": [flow_run_id]}, "level": {"ge_": 30}}}
    )
    assert [log["message"] for log in logs] == [
        "old checkpoints are not deleted; the next checkpoint's prune tries again: the storage "
        "broke down"
    ]


def test_the_deployment_is_a_dry_run() -> None:
    """A person who starts it with a click deletes nothing."""
    from trialflow.flows.prune import prune as prune_flow

    described = yaml.safe_load(Path(__file__).parents[2].joinpath(PREFECT_FILE).read_text())
    (deployment,) = [each for each in described["deployments"] if each["name"] == "prune"]
    assert deployment["entrypoint"] == "trialflow.flows.prune.prune"
    assert deployment["parameters"] == {"dry_run": True}
    assert prune_flow.parameters.properties["dry_run"]["default"] is True
