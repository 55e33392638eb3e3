"""The flow `evaluate`: a committed checkpoint, validated once on the experiment's slots.

It trains nothing and stores nothing: what comes of it are the metrics, as the run's result and as
a table among its artifacts. The slots may be others than those that saved the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_type_hints

from prefect import flow, runtime
from prefect.artifacts import create_table_artifact
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger

from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    RankFailed,
    Stalled,
    Stopped,
)
from trial_core.retention.claims import running
from trial_core.run.observer import current_observer
from trial_core.run.run_dirs import locked_run_dir, slug, trial_id
from trial_core.run.stop_request import StopHandler
from trialflow.flows.lifecycle.crash_limit import refuse_if_crashed_too_often
from trialflow.flows.lifecycle.gpu_slots import gpu_slots
from trialflow.flows.lifecycle.stop_watch import StopWatch
from trialflow.flows.train import fetch, launch_slots, obeying, patience, refuse_missing_code
from trialflow.tasks.build import build_loaders, build_trial
from trialflow.tasks.run import TrialRun
from trialflow.tasks.validate import validate


@dataclass(frozen=True)
class EvaluateResult:
    """What a run of the flow came to.

    Attributes:
        checkpoint_uuid: the checkpoint that was validated.
        trial: the trial that saved it.
        batches_trained: after how many batches.
        metrics: of the validation.
        run_dir: the folder of this run on this machine, with its ranks' logs.
        flow_run_id: Prefect's id of this run.
    """

    checkpoint_uuid: str
    trial: str
    batches_trained: int
    metrics: dict[str, Any]
    run_dir: str | None = None
    flow_run_id: str | None = None


@flow(name="evaluate", flow_run_name="evaluate {config.name}", validate_parameters=True)
def evaluate(
    config: ExperimentConfig, checkpoint: str | None = None
) -> EvaluateResult | State[Any]:
    """Validate a committed checkpoint.

    Args:
        config: the experiment: its trial, validation data, slots, and where its checkpoints are.
        checkpoint: uuid of the checkpoint, or how it begins. Default: the newest undamaged one of
            the experiment's newest trial.

    Raises:
        CheckpointNotFound: there is no such checkpoint.
        CheckpointDamaged: the one that was asked for is; or all there are.
        TrialError: the trial does not report the searcher's metric.
        RankFailed: a rank died, or the trial raised.
        Stalled: the ranks hang.
    """
    flow_run_id = str(runtime.flow_run.id)
    settings = config.stopping
    refuse_if_crashed_too_often(config.max_restarts)
    refuse_missing_code(config)
    with (
        gpu_slots(config) as devices,
        StopHandler(settings.grace_seconds) as stopping,
        StopWatch(stopping, settings.time_budget_seconds) as watch,
    ):
        result = watch.concluding(
            lambda: evaluate_checkpoint(config, checkpoint, flow_run_id, stopping, devices)
        )
    if isinstance(result, State):
        return result
    return replace(result, flow_run_id=flow_run_id)


# What flow.serve() pickles has no names of this module, which the annotations are read in.
evaluate.fn.__annotations__ = get_type_hints(evaluate.fn)


def evaluate_checkpoint(
    config: ExperimentConfig,
    checkpoint: str | None,
    unique: str,
    stopping: StopHandler,
    devices: Mapping[str, str],
) -> EvaluateResult:
    """Launch the slots, validate on them, and end them. Raises as `evaluate`.

    Args:
        unique: tells this run's folder and its claim from those of others.
        devices: variables for the ranks that say which accelerators are this run's.
    """
    store = CheckpointStore(config.checkpoint_storage.url, config.checkpoint_storage.options)
    candidates = _candidates(store, config.name, checkpoint)
    name = trial_id(f"{config.name} evaluation", unique)
    with locked_run_dir(name, patience(config)) as run_dir, running(store, name) as claim:
        run = TrialRun(
            config, name, run_dir, store, current_observer(), stopping, claim, devices=devices
        )
        try:
            with launch_slots(run) as run.slots, obeying(run):
                build_trial(run)
                manifest = _fetch_first_undamaged(run, candidates, checkpoint)
                build_loaders(run, ResumePoint.warm(manifest, weights_only=True))
                if validate(run, manifest.progress.batches_trained) is None:
                    raise Stopped(f"{stopping.request}, before the validation had ended")
        except (RankFailed, Stalled) as failure:
            get_run_logger().error("%s", failure.report())
            raise
    metrics = run.metrics.get("validation", {})
    _show(config, manifest, metrics)
    return EvaluateResult(
        checkpoint_uuid=manifest.uuid,
        trial=manifest.trial,
        batches_trained=manifest.progress.batches_trained,
        metrics=metrics,
        run_dir=str(run_dir),
    )


def _candidates(store: CheckpointStore, experiment: str, asked_for: str | None) -> list[Manifest]:
    """The checkpoint that is asked for; or those that may do, best first."""
    if asked_for is not None:
        return [store.open(asked_for)]
    trial = store.newest_trial(experiment)
    found = list(store.candidates(trial)) if trial is not None else []
    if not found:
        raise CheckpointNotFound(
            f"no checkpoint in {store.url} is of experiment {experiment!r}: train it first, or "
            "name a checkpoint"
        )
    return found


def _fetch_first_undamaged(
    run: TrialRun, candidates: list[Manifest], asked_for: str | None
) -> Manifest:
    """Bring a checkpoint to the ranks; a damaged one gives way to the next."""
    for manifest in candidates:
        damage = fetch(run, ResumePoint.warm(manifest, weights_only=True), manifest)
        if damage is None:
            return manifest
    what = "the checkpoint" if asked_for else "every checkpoint of the trial, of which the last"
    raise CheckpointDamaged(f"{what} is damaged: {damage}")


def _show(config: ExperimentConfig, manifest: Manifest, metrics: dict[str, Any]) -> None:
    """The metrics as a table, on the run's page."""
    create_table_artifact(
        [{"metric": name, "value": str(value)} for name, value in metrics.items()],
        key=f"evaluation-{slug(config.name)}",
        description=f"Checkpoint {manifest.uuid} of trial {manifest.trial}, after "
        f"{manifest.progress.batches_trained} batches",
    )
