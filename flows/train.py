"""The flow `train`: one trial, from its experiment to its last checkpoint.

`trial_core.run.run_loop` has the order of a run's stages, and `TrainStages` below has each stage as
a Prefect task. `train_trial` keeps the run going: it launches the ranks, launches them again if
they fail, and always ends them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, get_type_hints

from prefect import flow, runtime
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger

from trial_core.checkpoint.layout import checked_trial
from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.errors import (
    CheckpointError,
    LaunchError,
    RankFailed,
    Stalled,
    Stopped,
    TopologyMismatch,
    TrialError,
)
from trial_core.ledger.run_clock import RunClock
from trial_core.ledger.stored_ledger import KeptLedger
from trial_core.retention.trial_owner import own_trial
from trial_core.run.choose_resume_point import resume_points
from trial_core.run.observer import current_observer
from trial_core.run.run_dirs import clear_kept, clear_rank_files, locked_run_dir, trial_id
from trial_core.run.run_loop import TrialResult as TrialResult  # part of the flow's interface
from trial_core.run.run_loop import Validation, follow_schedule
from trial_core.run.sequencer import Progress, Schedule
from trial_core.run.stop_requests import StopHandler, StopRequest
from trial_core.slots.slot_group import SlotGroup
from trial_core.transfer.staged_checkpoint import StagedCheckpoint
from trial_core.transfer.trial_code import code_of_folder
from trial_core.units import EpochLength, in_batches
from trialflow.flows.code_source import refuse_missing_code, stored_trial_code
from trialflow.flows.lifecycle.crash_limit import check_crash_limit
from trialflow.flows.lifecycle.relaunches import Relaunches
from trialflow.flows.lifecycle.run_log import readable_task_log
from trialflow.flows.lifecycle.run_names import train_name
from trialflow.flows.lifecycle.shared_gpus import gpu_slots
from trialflow.flows.lifecycle.stop_monitor import POLL_SECONDS, StopMonitor, while_stopping
from trialflow.flows.rank_placement import Placement, place_ranks
from trialflow.flows.script import follow_script
from trialflow.flows.uploads import Uploads
from trialflow.tasks.build import build_loaders, build_trial, fetch_checkpoint
from trialflow.tasks.callbacks import run_callbacks
from trialflow.tasks.checkpoint import checkpoint_save, checkpoint_upload, sweep_leftovers
from trialflow.tasks.report import Report
from trialflow.tasks.report.artifact import ReportArtifact
from trialflow.tasks.train_workload import train_workload
from trialflow.tasks.trial_run import TrialRun
from trialflow.tasks.upload_run_files import upload_run_files
from trialflow.tasks.validate import check_metrics, report_validation, validate


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
        TrialflowError: another run that may be live has the trial.
    """
    flow_run_id = str(runtime.flow_run.id)
    trial = checked_trial(trial or trial_id(config.name, flow_run_id))
    page = ReportArtifact(trial).url
    get_run_logger().info("trial %s%s", trial, f"; its report is at {page}" if page else "")
    settings, began = config.stopping, time.monotonic()
    check_crash_limit(config.max_restarts)
    refuse_missing_code(config)
    with (
        readable_task_log(),
        gpu_slots(config) as devices,
        StopHandler(settings.grace_seconds) as stopping,
        StopMonitor(stopping, settings) as watch,
    ):
        waited_seconds = time.monotonic() - began
        result = watch.run(
            lambda: train_trial(config, trial, stopping, devices, take_over, waited_seconds),
            describe_saved,
        )
    if isinstance(result, State):
        return result
    return replace(result, flow_run_id=flow_run_id)


# flow.serve() pickles the function without this module's names, which the annotations need.
train.fn.__annotations__ = get_type_hints(train.fn)


def train_trial(
    config: ExperimentConfig,
    trial: str,
    stopping: StopHandler,
    devices: Mapping[str, str],
    take_over: bool = False,
    waited_seconds: float = 0.0,
) -> TrialResult:
    """Train a trial until it ends or is asked to stop; restart failed ranks.

    Args:
        devices: environment variables that give the ranks this run's accelerators.
        take_over: whether to take the trial from another run that may be live.
        waited_seconds: how long the run has waited for its devices.

    Raises:
        TrialflowError: another run that may be live has the trial.
        RankFailed, Stalled: the ranks failed, and no restart is left or would help.
        Stopped: the run was asked to stop before it could save.
    """
    store = CheckpointStore(config.checkpoint_storage.url, config.checkpoint_storage.options)
    store.check_writable()
    clock = RunClock(waited_seconds)
    moved = None  # the result of a launch that left its nodes
    with (
        locked_run_dir(trial, takeover_wait_seconds(config)) as run_dir,
        # Once, not per restart: a restart must not take the trial back from a newer run.
        own_trial(
            store, trial, str(runtime.flow_run.id), take_over=take_over,
            source=config.searcher.source_checkpoint_uuid,
        ) as (claim, fence),
        KeptLedger(
            store, trial, fence.number, clock, config.cost.per_slot_hour, get_run_logger()
        ) as ledger,
        Report(
            config, trial, run_dir, current_observer(), store, stopping, ledger.read
        ) as report,
        place_ranks(config, run_dir) as placement,
    ):  # fmt: skip
        relaunches = Relaunches(placement, report, config.max_restarts)
        clock.switch("launch")
        stored_code = stored_trial_code(config, store, trial, run_dir)
        while True:
            clock.switch("launch")
            # Again for each launch: the code may have been corrected since.
            code = stored_code or code_of_folder(config.code, store, get_run_logger())
            run = TrialRun(
                config, trial, run_dir, store, report, stopping, claim, fence, devices, code, clock
            )  # fmt: skip
            sweep_leftovers(run)
            try:
                result = train_once(run, placement, relaunches)
            except (RankFailed, Stalled, LaunchError, TopologyMismatch) as failure:
                clock.switch("idle")
                moved = None  # there may be a newer checkpoint
                if isinstance(failure, (RankFailed, Stalled)) and stopping.request is not None:
                    get_run_logger().error("%s", failure.report())
                    raise Stopped(f"{while_stopping(failure)}{report.last_checkpoint}") from failure
                if not relaunches.grant(failure, run):
                    raise
                clear_rank_files(run_dir)
                if stopping.wait(relaunches.pause_seconds):
                    raise Stopped(f"no ranks ran{report.last_checkpoint}") from failure
                continue
            except Stopped as stopped:
                if run.moves and stopping.request is None:  # before there was anything to save
                    report.moving(f"ended before training, to continue on other nodes: {run.moves}")
                    clear_rank_files(run_dir)
                    continue
                if moved is None or run.can_save:
                    raise Stopped(f"{stopped}{report.last_checkpoint}") from stopped
                result = moved
            except (CheckpointError, TrialError) as failure:
                if stopping.request is None:
                    raise
                raise type(failure)(f"{failure}{report.last_checkpoint}") from failure
            if not (run.moves and _continues_elsewhere(run, result)):
                break
            moved = result
            report.moving(f"saved, to continue on other nodes: {run.moves}")
            clear_rank_files(run_dir)
        if not result.stopped_early:
            clear_kept(run_dir)
        request = stopping.final_request()
        report.ended(_ending(result, request), run.tensorboard_url)
        return replace(
            result,
            stop_reason=str(request) if request else None,
            tensorboard_url=run.tensorboard_url,
            report_path=str(report.path),
            run_dir=str(run_dir),
            ledger=ledger.read().to_json(),
        )


def train_once(run: TrialRun, placement: Placement, relaunches: Relaunches) -> TrialResult:
    """Launch the ranks of `run`, and train until it ends, is stopped or moves to other nodes."""
    # In this order: uploads need the ranks, and end before or (memory://) after them.
    with (
        Uploads(run) as uploads,
        launch_slots(run, placement) as run.slots,
        stopping_ranks(run),
        placement.watching(run),
    ):
        try:
            run.clock.switch("idle")
            build_trial(run)
            stages = TrainStages(run, uploads)
            return follow_script(run, stages) if run.config.is_script else follow_schedule(stages)
        except RankFailed as failure:
            run.note_failure(failure)
            raise
        finally:
            relaunches.launch_ended(run)


def _continues_elsewhere(run: TrialRun, result: TrialResult) -> bool:
    """Whether a launch that has moved away from its nodes has more to train."""
    return result.stopped_early and not run.stop_requested and run.stopping.request is None


def describe_saved(result: TrialResult) -> str:
    """What a stopped run has saved, for people."""
    if result.checkpoint_uuid is None:
        return "nothing to save: no batch was trained"
    return f"saved at batch {result.batches_trained}, checkpoint {result.checkpoint_uuid}"


def _ending(result: TrialResult, request: StopRequest | None) -> str:
    if not result.stopped_early:
        return "completed"
    why = f"stopped: {request}" if request else "stopped: as the trial asked"
    return f"{why}; {describe_saved(result)}"


def takeover_wait_seconds(config: ExperimentConfig) -> float:
    """How long to wait for the trial's folder: a presumed-dead run of a deployment may hold it.

    That run notices within this time that it was superseded, and ends.
    """
    if runtime.deployment.id is None:
        return 0.0
    return config.stopping.grace_seconds + 2 * POLL_SECONDS


def launch_slots(run: TrialRun, placement: Placement) -> SlotGroup:
    """Launch the ranks of `run`. The result is a context manager, which ends them."""
    run.world_size, launcher = placement.prepare(run)
    run.clock.has_slots(run.world_size)
    return SlotGroup(
        run.world_size,
        working_dir=run.code.folder,
        log_dir=run.run_dir / "logs",
        environment={**run.config.rank_variables, **run.devices},
        launcher=launcher,
        on_batches=run.note_batches,
        on_log=run.observer.rank_logged,
        on_activity=run.note_activity,
        on_script=run.script_events.put,
        should_abort=lambda: run.stopping.request is not None,
    )


@contextmanager
def stopping_ranks(run: TrialRun) -> Iterator[None]:
    """Pass stop requests on to the ranks during the block (step 4 in `run/stop_requests.py`)."""

    def stop() -> None:
        if run.can_save:
            run.slots.stop()
        else:
            run.slots.abort("nothing to save: training had not begun")

    def end() -> None:
        run.slots.abort("not saved: the grace period was over, or a second signal came")

    with run.stopping.subscribed(stop, end):
        yield


HOW_TO_GO_ON = (
    "to train it further, raise searcher.max_length; to begin a new trial, start a run without "
    "`trial` (`trialflow train` without --resume)"
)


class TrainStages:
    """The stages of a run as Prefect tasks. See `RunStages` for what each method means."""

    logger: logging.Logger | logging.LoggerAdapter[Any]

    def __init__(self, run: TrialRun, uploads: Uploads) -> None:
        self._run = run
        self._uploads = uploads
        self.trial = run.trial
        self.store = run.store
        self.metrics = run.metrics
        self.metric: str | None = run.config.searcher.metric
        self.skips_when_busy = run.config.checkpointing.when_busy == "skip"
        self.how_to_go_on = HOW_TO_GO_ON
        self.logger = get_run_logger()

    @property
    def newest_checkpoint(self) -> str | None:
        return self._uploads.newest.uuid if self._uploads.newest else None

    @property
    def is_uploading(self) -> bool:
        return self._uploads.is_busy

    def resume_points(self) -> list[ResumePoint]:
        return resume_points(self._run.store, self._run.config, self._run.trial)

    def fetch(self, point: ResumePoint) -> str | None:
        return fetch(self._run, point)

    def schedule(self, progress: Progress) -> Schedule:
        return self._run.config.schedule()

    def build_loaders(self, point: ResumePoint) -> EpochLength | None:
        run, begin = self._run, point.progress.batches_trained
        epoch = build_loaders(run, point)
        end = in_batches(run.config.schedule().max_length, epoch)
        run.end = end
        run.observer.run_started(run.trial, end, begin, run.batch_samples)
        return epoch

    def run_hook(self, hook: str, batches_trained: int, **arguments: Any) -> None:
        run_callbacks(self._run, hook, batches_trained, **arguments)
        if hook == "on_training_start":  # from here on a stop request saves first
            self._run.can_save = True
            if self._run.moves:
                self._run.slots.stop()

    def metric_names(self) -> list[str] | None:
        return check_metrics(self._run)

    @property
    def may_add_metrics(self) -> bool:
        return "on_validation_end" in self._run.hooks

    def train(self, begin: int, until: int) -> int:
        return train_workload(self._run, begin, until)

    def validate(self, batches_trained: int) -> bool:
        return validate(self._run, batches_trained)

    def report_validation(self, batches_trained: int) -> Validation:
        try:
            return Validation(report_validation(self._run, batches_trained))
        except TrialError as mistake:
            return Validation(mistake=mistake)

    def save(self, progress: Progress) -> StagedCheckpoint:
        staged = checkpoint_save(self._run, progress)
        self._run.has_saved(progress.batches_trained)
        return staged

    def start_upload(self, staged: StagedCheckpoint) -> None:
        self._uploads.start(checkpoint_upload.submit(self._run, staged))

    def finish_upload(self) -> None:
        self._uploads.wait()

    def poll(self) -> bool:
        self._uploads.poll()
        return self._run.should_stop

    def finish(self, batches_trained: int) -> None:
        self._uploads.finish_pruning()
        if self._run.writes_run_files:
            self._run.tensorboard_url = upload_run_files(self._run, batches_trained)


def fetch(run: TrialRun, point: ResumePoint) -> str | None:
    """Fetch a resume point's checkpoint to the ranks. Return what is damaged; None if intact.

    Raises:
        CheckpointError: these ranks cannot restore it.
        StorageError: the storage failed.
    """
    if point.checkpoint is None:
        return None
    if run.topology is not None:
        point.require_convertible(run.topology)
    run.claim.renew(point.checkpoint.name)  # first, so that it is not pruned meanwhile
    return fetch_checkpoint(run, point.checkpoint, restore=point.restore)
