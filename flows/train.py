"""The flow `train`: one trial, from its experiment to its last checkpoint.

The stages of a run are the tasks of `STAGES`. `trial_core/run/run_loop.py` has their order, and
`trial_core/driver/drive.py` launches the ranks, launches them again if they fail, and always ends
them. A Core API script, or one with a `Trainer`, is run by `run-script` in place of a trial.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from prefect import flow, runtime
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger

from trial_core.checkpoint.layout import checked_trial
from trial_core.config import ExperimentConfig
from trial_core.driver.code_source import refuse_missing_code
from trial_core.driver.drive import Caller, describe_saved, drive_trial
from trial_core.driver.observers import current_observer
from trial_core.driver.stages import Stages
from trial_core.report.live_report import PAGE
from trial_core.run.run_dirs import run_dir_of, trial_id
from trial_core.run.run_loop import TrialResult as TrialResult  # part of the flow's interface
from trial_core.run.stop_requests import StopHandler
from trialflow.flows.lifecycle.crash_limit import check_crash_limit
from trialflow.flows.lifecycle.run_log import logger_finder, readable_task_log
from trialflow.flows.lifecycle.run_names import train_name
from trialflow.flows.lifecycle.shared_gpus import gpu_slots
from trialflow.flows.lifecycle.stop_monitor import POLL_SECONDS, StopMonitor
from trialflow.flows.lifecycle.storage_of_run import StorageLabel, storage_of_run
from trialflow.tasks import stages
from trialflow.tasks.artifact import ARTIFACT_ERRORS, ReportArtifact

STAGES = Stages(
    build_trial=stages.build_trial,
    fetch_checkpoint=stages.fetch_checkpoint,
    build_loaders=stages.build_loaders,
    callbacks=stages.callbacks,  # one for each hook that a callback of the trial overrides
    check_metrics=stages.check_metrics,
    train_workload=stages.train_workload,
    validate=stages.validate,
    checkpoint_save=stages.checkpoint_save,
    checkpoint_upload=stages.checkpoint_upload.submit,  # beside training
    checkpoint_prune=stages.checkpoint_prune.submit,
    run_script=stages.run_script,
    attach_trial=stages.attach_trial,
    upload_run_files=stages.upload_run_files,
)
"""The stages of a run as Prefect tasks."""


# flow.serve() pickles the flow without this module's names: no postponed annotations here.
@flow(name="train", flow_run_name=train_name, validate_parameters=True)
def train(
    config: ExperimentConfig, trial: str | None = None, take_over: bool = False
) -> TrialResult | State[Any]:
    """Train a trial. A run that is asked to stop saves first, and ends in the state Prefect wants.

    Args:
        config: the experiment.
        trial: id of the trial to continue from its last committed checkpoint. The default belongs
            to the flow run, so a retry of the flow run continues its trial.
        take_over: whether to take the trial from another run that may be live, which ends that run.
            A flow run that continues its own trial does not need it.

    Raises:
        CheckpointError: no trial may have the id `trial`.
        CheckpointNotFound: the storage does not know the trial `trial`.
        StorageError: it is not the storage that an earlier attempt of this flow run has used.
        TrialflowError: another run that may be live has the trial.
    """
    flow_run_id, is_new = str(runtime.flow_run.id), trial is None
    trial = checked_trial(trial or trial_id(config.name, flow_run_id))
    refuse_missing_code(config)
    _log_links(trial)
    settings, began = config.stopping, time.monotonic()
    check_crash_limit(config.max_restarts)
    with (
        readable_task_log(),
        gpu_slots(config) as devices,
        StopHandler(settings.grace_seconds) as stopping,
        StopMonitor(stopping, settings) as watch,
    ):
        waited_seconds = time.monotonic() - began
        result = watch.run(
            lambda: train_trial(
                config, trial, stopping, devices, is_new, take_over, waited_seconds
            ),
            describe_saved,
        )
    if isinstance(result, State):
        return result
    return replace(result, flow_run_id=flow_run_id)


def train_trial(
    config: ExperimentConfig,
    trial: str,
    stopping: StopHandler,
    devices: Mapping[str, str],
    is_new: bool = True,
    take_over: bool = False,
    waited_seconds: float = 0.0,
) -> TrialResult:
    """Train a trial with the stages as tasks of this flow run. Raises as `drive_trial`.

    Args:
        devices: environment variables that give the ranks this run's accelerators.
        is_new: whether the trial's id comes from this flow run's.
        take_over: whether to take the trial from another run that may be live.
        waited_seconds: how long the run has waited for its devices.
    """
    label, page = StorageLabel(), ReportArtifact(trial)

    def publish(text: str) -> None:
        page.write(text)
        label.send()

    caller = Caller(
        attempt=str(runtime.flow_run.id),
        stopping=stopping,
        find_logger=logger_finder(),
        stages=STAGES,
        observer=current_observer(),
        publish=publish,
        publish_errors=ARTIFACT_ERRORS,
        devices=devices,
        is_new=is_new,
        storage=storage_of_run(config.stopping.server_outage_seconds, stopping),
        begun=label.note,
        take_over=take_over,
        takeover_wait_seconds=takeover_wait_seconds(config),
        waited_seconds=waited_seconds,
    )
    return drive_trial(config, trial, caller)


def _log_links(trial: str) -> None:
    """Log where the report will be: the file, which needs no server and no login, and the UI's."""
    page = ReportArtifact(trial).url
    shown = f", and in Prefect at {page}" if page else ""
    file = (run_dir_of(trial) / PAGE).as_uri()
    get_run_logger().info("trial %s; its report is at %s%s", trial, file, shown)


def takeover_wait_seconds(config: ExperimentConfig) -> float:
    """How long to wait for the trial's folder: a presumed-dead run of a deployment may hold it.

    That run notices within this time that it was superseded, and ends.
    """
    if runtime.deployment.id is None:
        return 0.0
    return config.stopping.grace_seconds + 2 * POLL_SECONDS
