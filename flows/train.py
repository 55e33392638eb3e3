"""The flow `train`: one trial, from its experiment to its last checkpoint.

The stages of a run are tasks (`tasks/stages.py`). `trial_core/driver/loop.py` has their order.
`trial_core/driver/drive.py` launches the ranks, launches them again if they fail, and always ends
them. A Core API script, or one with a `Trainer`, is run by `run-script` in place of a trial.
"""

import os
import time
from dataclasses import dataclass, replace
from typing import Annotated, Any

from prefect import flow, runtime
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.states import Completed
from pydantic import InstanceOf
from pydantic.json_schema import SkipJsonSchema

from trial_core.checkpoint.layout import checked_trial
from trial_core.config import ExperimentConfig
from trial_core.driver.changed_settings import check_keep
from trial_core.driver.code_source import refuse_missing_code
from trial_core.driver.drive import drive_trial
from trial_core.driver.placement import importing_ahead
from trial_core.driver.result import TrialResult as TrialResult, describe_saved, status_of
from trial_core.driver.run import Given
from trial_core.errors import ConfigError
from trial_core.models.checkpoint_reference import open_checkpoint
from trial_core.observe.events.observers import Observers, current_observer
from trial_core.observe.report.live_report import PAGE
from trial_core.processes.machine.run_dirs import run_dir_of, trial_id
from trial_core.schedule.stop_requests import StopHandler
from trial_core.schedule.units import TrainUnit
from trialflow.flows.lifecycle.crash_limit import check_crash_limit
from trialflow.flows.lifecycle.parent_runs import identity_of_run
from trialflow.flows.lifecycle.run_log import logger_finder, readable_task_log
from trialflow.flows.lifecycle.run_names import train_name
from trialflow.flows.lifecycle.shared_gpus import gpu_slots
from trialflow.flows.lifecycle.stop_monitor import POLL_SECONDS, StopMonitor
from trialflow.flows.lifecycle.storage_of_run import StorageLabel, storage_of_run
from trialflow.flows.server.prefect_settings import prepare_temporary_server
from trialflow.tasks.artifact import ReportArtifact
from trialflow.tasks.checkpoint_use import HasCheckpoint, checkpoint_of, store_of
from trialflow.tasks.client_retries import NO_ANSWER
from trialflow.tasks.events import RunEvents
from trialflow.tasks.required_experiment import GIVEN, MISSING, experiment_form
from trialflow.tasks.stages import as_prefect_task
from trialflow.tasks.storage_block import with_credentials

prepare_temporary_server()


@dataclass(frozen=True)
class PartOfTraining:
    """What a flow that has a trial trained in parts asks `train` for: a search, for example.

    Attributes:
        attempt: identifies the trial's owner: the same value again continues its own attempt.
        until: where the trial validates, saves and waits; None to train it to its end.
    """

    attempt: str
    until: TrainUnit | None


# flow.serve() pickles the flow without this module's names: no postponed annotations here.
@experiment_form(
    trial="Trial to continue",
    start="Start of a new trial",
    config="Experiment",
    keep="Settings to keep",
    take_over="Take over",
)
@flow(name="train", flow_run_name=train_name, validate_parameters=True)
def train(
    config: Annotated[ExperimentConfig, GIVEN] = MISSING,
    trial: str | None = None,
    take_over: bool = False,
    keep: list[str] | None = None,
    start: str | SkipJsonSchema[InstanceOf[HasCheckpoint]] | None = None,
    part: SkipJsonSchema[InstanceOf[PartOfTraining]] | None = None,
) -> TrialResult | State[Any]:
    """Train a trial. A run that is asked to stop saves first, and ends in the state Prefect wants.

    Args:
        config: the experiment: the fields of an experiment file.
        trial: id of the trial to continue from its last committed checkpoint. The default belongs
            to the flow run, so a retry of the flow run continues its trial. In a flow of your own
            it belongs to that flow's run and to this call.
        take_over: True to take the trial from another run that may be live, which ends that run.
            A flow run that continues its own trial does not need it.
        keep: settings that stay as in the checkpoint, although the experiment has other values:
            ``optimizer``, ``scheduler``, ``scaler``, ``engine``, or one of them: ``optimizer.lr``.
        start: the start of a new trial, at batch 0: the result of another run, which stands for its
            checkpoint; a reference to a checkpoint of the same storage, such as ``best:TRIAL``; or
            the path or URL of a checkpoint of another program. A retry keeps the start that its
            trial has used.
        part: what a flow asks for that has the trial trained in parts; `trial` may then be new.

    Raises:
        ConfigError: `start` is in another storage, or is a URL with a password or a signature; or
            `keep` names something unknown.
        CheckpointNotFound: the checkpoint `start` does not exist.
        ModelNotFound: `start` names a model, alias or version that does not exist.
        CheckpointError: `trial` is not a valid id of a trial.
        CheckpointNotFound: the storage does not know the trial `trial`.
        StorageError: it is not the storage that an earlier attempt of this flow run has used.
        TrialflowError: another run that may be live has the trial.
    """
    attempt, is_new = identity_of_run(config), trial is None
    if part is not None:
        attempt = part.attempt
    trial = checked_trial(trial or trial_id(config.name, attempt))
    refuse_missing_code(config)
    check_keep(keep or ())
    if start is not None:
        config = started_from(config, start, trial)
    opened = with_credentials(config)
    _log_links(trial)
    settings, began = config.stopping, time.monotonic()
    check_crash_limit(config.max_restarts)
    with (
        readable_task_log(),
        gpu_slots(config) as devices,
        StopHandler(settings.grace_seconds) as stopping,
        StopMonitor(stopping, settings) as watch,
        importing_ahead(opened),
    ):
        given = Given(
            attempt=attempt,
            stopping=stopping,
            devices=devices,
            is_new=is_new if part is None else None,
            pause_at=None if part is None else part.until,
            take_over=take_over,
            keep=keep or (),
            takeover_wait_seconds=takeover_wait_seconds(config, is_part=part is not None),
            waited_seconds=time.monotonic() - began,
            task="" if part is None else f"search {part.attempt.partition('/')[0]}",
        )
        result = watch.run(lambda: train_trial(opened, trial, given), describe_saved)
    if isinstance(result, State):
        return result
    result = replace(result, flow_run_id=str(runtime.flow_run.id), config=config)
    # The state of a run that ended early says why.
    return Completed(message=status_of(result), data=result) if result.stopped_early else result


def train_trial(config: ExperimentConfig, trial: str, given: Given) -> TrialResult:
    """Train a trial with the stages as tasks of this flow run. Raises as `drive_trial`."""
    label, page = StorageLabel(), ReportArtifact(trial)

    def publish(text: str) -> None:
        page.write(text)
        label.send()

    given = replace(
        given,
        find_logger=logger_finder(),
        execute=as_prefect_task,
        observer=Observers(current_observer(), RunEvents(config, trial)),
        publish=publish,
        publish_errors=NO_ANSWER,
        links=page.links,
        storage=storage_of_run(config.stopping.server_outage_seconds, given.stopping),
        begun=label.note,
    )
    return drive_trial(config, trial, given)


def started_from(
    config: ExperimentConfig, start: str | HasCheckpoint, trial: str
) -> ExperimentConfig:
    """Return the experiment with the start of a new trial. Raises as `train`.

    A trial that has saved keeps its recorded start: by now a reference may mean another checkpoint,
    or the checkpoint may have been deleted.
    """
    weights_only = config.searcher.source_weights_only
    if isinstance(start, str) and (os.sep in start or os.path.exists(start)):
        return config.starting_from(path=start, weights_only=weights_only)
    there = config if isinstance(start, str) else start.config or config
    place, own = there.checkpoint_storage.url, config.checkpoint_storage.url
    if place != own:
        raise ConfigError(
            f"start: the checkpoint is in {place}, and this experiment's storage is {own}; train "
            "with the same storage, or give start the path of an exported folder"
        )
    store = store_of(config)
    if (saved := store.newest(trial)) is not None:
        recorded = saved.config.get("searcher", {})
        return config.starting_from(
            uuid=recorded.get("source_checkpoint_uuid"), path=recorded.get("source_checkpoint"),
            weights_only=weights_only,
        )  # fmt: skip
    _, reference = checkpoint_of(start, None, config)
    uuid = open_checkpoint(store, reference).uuid
    return config.starting_from(uuid=uuid, weights_only=weights_only)


def _log_links(trial: str) -> None:
    """Log where the report is: the file, which needs no server and no login, and the UI's page."""
    page = ReportArtifact(trial).url
    shown = f", and in Prefect at {page}" if page else ""
    file = (run_dir_of(trial) / PAGE).as_uri()
    get_run_logger().info("trial %s; its report is at %s%s", trial, file, shown)


def takeover_wait_seconds(config: ExperimentConfig, is_part: bool = False) -> float:
    """How long to wait for the trial's folder: a presumed-dead run may hold it.

    That run notices within this time that it was superseded, and ends. A run without a deployment
    has none, unless it `is_part` of another one, which may be a retry.
    """
    if runtime.deployment.id is None and not is_part:
        return 0.0
    return config.stopping.grace_seconds + 2 * POLL_SECONDS
