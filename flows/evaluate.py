"""The flow `evaluate`: validates a committed checkpoint once on the experiment's slots.

It trains and stores nothing. The metrics are the run's result, and a table among its artifacts.
The validation hooks of callbacks run, on_validation_end included, which may change the metrics.
The slots may have another topology than the slots that saved the checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from prefect import flow, runtime
from prefect.artifacts import create_table_artifact
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger

from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.retention.claims import RunClaim
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.trial_code import TrialCode, code_of_folder
from trial_core.common.text_format import unique_slug
from trial_core.config import ExperimentConfig
from trial_core.driver.changed_settings import other_hyperparameters
from trial_core.driver.code_source import fetched_code, refuse_missing_code
from trial_core.driver.drive import launch_slots, stopping_ranks
from trial_core.driver.fetch_resume_point import fetch, require_convertible
from trial_core.driver.placement import announcer, place_ranks
from trial_core.driver.run import Launch, Run
from trial_core.driver.stages.build import build_loaders, build_trial
from trial_core.driver.stages.callbacks import call_hook
from trial_core.driver.stages.validate import report_validation, validate
from trial_core.errors import CheckpointDamaged, CheckpointNotFound, RankFailed, Stalled, Stopped
from trial_core.models.checkpoint_reference import open_checkpoint
from trial_core.observe.events.observers import Observers, current_observer
from trial_core.processes.machine.run_dirs import locked_run_dir, trial_id
from trial_core.schedule.stop_requests import StopHandler
from trial_core.search.settings import SearchExperiment
from trialflow.flows.lifecycle.crash_limit import check_crash_limit
from trialflow.flows.lifecycle.run_log import logger_finder, readable_task_log
from trialflow.flows.lifecycle.run_names import evaluate_name
from trialflow.flows.lifecycle.shared_gpus import gpu_slots
from trialflow.flows.lifecycle.stop_monitor import StopMonitor
from trialflow.flows.train import takeover_wait_seconds
from trialflow.tasks.checkpoint_use import ExperimentOrResult, HasCheckpoint, checkpoint_of
from trialflow.tasks.client_retries import NO_ANSWER
from trialflow.tasks.events import RunEvents
from trialflow.tasks.required_experiment import GIVEN, MISSING, experiment_form
from trialflow.tasks.stages import as_prefect_task
from trialflow.tasks.storage_block import with_credentials


@dataclass(frozen=True)
class EvaluateResult:
    """The result of a run of the flow.

    Attributes:
        checkpoint_uuid: the checkpoint that was validated.
        trial: the trial that saved it.
        batches_trained: how many batches the trial had trained when it saved the checkpoint.
        metrics: the validation metrics.
        run_dir: this run's folder on this machine, with its ranks' logs.
        changes: in which hyperparameters the experiment and the checkpoint differ: a sentence.
        flow_run_id: Prefect's id of this flow run.
        config: the experiment, with which later flows and tasks find the checkpoint.
    """

    checkpoint_uuid: str
    trial: str
    batches_trained: int
    metrics: dict[str, Any]
    run_dir: str | None = None
    changes: list[str] = field(default_factory=list)
    flow_run_id: str | None = None
    config: ExperimentConfig | None = field(default=None, repr=False)


# flow.serve() pickles the flow without this module's names: no postponed annotations here.
@experiment_form(checkpoint="Checkpoint", config="Experiment")
@flow(name="evaluate", flow_run_name=evaluate_name, validate_parameters=True)
def evaluate(
    config: Annotated[ExperimentConfig | HasCheckpoint, ExperimentOrResult(), GIVEN] = MISSING,
    checkpoint: str | None = None,
) -> EvaluateResult | State[Any]:
    """Validate a committed checkpoint.

    Args:
        config: the experiment: its trial, validation data, slots and checkpoint storage. Of one
            that searches, with the checkpoint's hyperparameters. Or the result of `train`,
            `evaluate` or `export`, for its experiment and its checkpoint.
        checkpoint: the checkpoint's uuid, or the first characters of it; ``best`` or ``latest`` of
            the experiment's newest trial, ``best:TRIAL`` or ``latest:TRIAL``; or a version in the
            registry: ``champion:MODEL``, ``previous:MODEL`` or ``MODEL:VERSION``. Default: the
            newest undamaged checkpoint of the experiment's newest trial. With a result, ``best``
            and ``latest`` mean its trial.

    Raises:
        ConfigError: the experiment names a script, or the result has no checkpoint or no
            experiment, such as that of `Trainer.fit`.
        CheckpointNotFound: the checkpoint does not exist.
        ModelNotFound: the model, alias or version does not exist.
        CheckpointDamaged: the given checkpoint is damaged, or all candidates are.
        StorageError: the storage cannot be read, or its clock and this machine's differ.
        TrialError: the trial does not report the searcher metric.
        RankFailed: a rank died, or the trial raised an exception.
        Stalled: the ranks make no progress.
    """
    if not isinstance(config, ExperimentConfig):
        config, checkpoint = checkpoint_of(config, checkpoint, None)
    flow_run_id = str(runtime.flow_run.id)
    settings = config.stopping
    config.require_trial("evaluate")
    check_crash_limit(config.max_restarts)
    refuse_missing_code(config)
    opened = with_credentials(config)
    with (
        readable_task_log(),
        gpu_slots(config) as devices,
        StopHandler(settings.grace_seconds) as stopping,
        StopMonitor(stopping, settings) as watch,
    ):
        result = watch.run(
            lambda: evaluate_checkpoint(opened, checkpoint, flow_run_id, stopping, devices)
        )
    if isinstance(result, State):
        return result
    _show(config, result)
    return replace(result, flow_run_id=flow_run_id, config=config)


def evaluate_checkpoint(
    config: ExperimentConfig,
    checkpoint: str | None,
    unique: str,
    stopping: StopHandler,
    devices: Mapping[str, str],
) -> EvaluateResult:
    """Launch the slots, validate on them, and end them. Raises as `evaluate` does.

    Args:
        unique: makes the names of this run's folder and claim unique.
        devices: environment variables that give the ranks this run's accelerators.
    """
    storage = config.checkpoint_storage
    store = CheckpointStore(storage.url, storage.options, config.name)
    store.check_clock()  # others would ignore the claim of a run with a wrong clock
    candidates = _candidates(store, config.name, checkpoint)
    if isinstance(config, SearchExperiment):  # its hyperparameters have ranges
        config = config.of_trial(candidates[0].hyperparameters, candidates[0].trial)
        current_observer().notice(
            f"the hyperparameters are those of checkpoint {candidates[0].uuid}: the experiment's "
            "are ranges"
        )
    name, logger = trial_id(f"{config.name} evaluation", unique), get_run_logger()
    with (
        locked_run_dir(name, takeover_wait_seconds(config), "an evaluation") as run_dir,
        RunClaim(store, name) as claim,
        place_ranks(config, run_dir, announcer(logger, current_observer())) as placement,
    ):
        if config.environment.code == "from_checkpoint":
            code = fetched_code(store, candidates[0], run_dir, logger)
        elif placement.sends_code:
            code = code_of_folder(config, store, logger, must_send=True)
        else:
            code = TrialCode(config.code)
        run = Run(
            config, name, run_dir, store, claim, devices=devices, stopping=stopping,
            observer=Observers(current_observer(), RunEvents(config, name)),
            find_logger=logger_finder(), execute=as_prefect_task,
        )  # fmt: skip
        launch = Launch(run, code)
        try:
            with launch_slots(launch, placement) as launch.slots, stopping_ranks(launch):
                build_trial(launch)
                manifest = _fetch_first_intact(launch, candidates, checkpoint)
                launch.warn(changes := other_hyperparameters(manifest, config))
                build_loaders(launch, ResumePoint.warm(manifest, weights_only=True))
                batches_trained = manifest.progress.batches_trained
                if not validate(launch, batches_trained):
                    raise Stopped("the validation had not ended")
                call_hook(launch, "on_validation_end", batches_trained)
                report_validation(launch, batches_trained)
        except (RankFailed, Stalled) as failure:
            if isinstance(failure, Stalled):
                run.observer.stalled(failure.during, failure.seconds, str(failure))
            logger.error("%s", failure.report())
            raise
    return EvaluateResult(
        checkpoint_uuid=manifest.uuid,
        trial=manifest.trial,
        batches_trained=manifest.progress.batches_trained,
        metrics=launch.answers.metrics.get("validation", {}),
        run_dir=str(run_dir),
        changes=changes,
    )


def _candidates(store: CheckpointStore, experiment: str, checkpoint: str | None) -> list[Manifest]:
    """The given checkpoint, or the checkpoints of the experiment's newest trial, best first."""
    if checkpoint is not None:
        return [open_checkpoint(store, checkpoint)]
    trial = store.newest_trial(experiment)
    found = list(store.resume_candidates(trial)) if trial is not None else []
    if not found:
        raise CheckpointNotFound(
            f"no checkpoint in {store.url} is of experiment {experiment!r}: train it first, or "
            "name a checkpoint"
        )
    return found


def _fetch_first_intact(
    launch: Launch, candidates: list[Manifest], checkpoint: str | None
) -> Manifest:
    """Fetch the first candidate that is not damaged."""
    for manifest in candidates:
        point = ResumePoint.warm(manifest, weights_only=True)
        require_convertible(launch, point)
        try:
            damage = fetch(launch, point)
        except CheckpointNotFound as error:  # deleted since the candidates were listed
            if checkpoint:
                raise
            damage = str(error)
        if damage is None:
            return manifest
    what = "the checkpoint" if checkpoint else "every checkpoint of the trial, of which the last"
    raise CheckpointDamaged(f"{what} is damaged: {damage}")


def _show(config: ExperimentConfig, result: EvaluateResult) -> None:
    """Show the metrics as a table on the flow run's page, if the server answers."""
    metrics = result.metrics
    try:
        create_table_artifact(
            [{"metric": name, "value": str(value)} for name, value in metrics.items()],
            key=unique_slug(f"evaluation-{config.name}"),
            description=f"Checkpoint {result.checkpoint_uuid} of trial {result.trial}, after "
            f"{result.batches_trained} batches",
        )
    except NO_ANSWER as error:
        get_run_logger().warning("the table of metrics was not stored: %s; %s", error, metrics)
