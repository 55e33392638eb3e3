"""The flow `train`: one trial, from an experiment to its last checkpoint.

Read `follow_schedule` for the story of a run; `train` wraps it in what keeps a run going: slots
that are always torn down; a new group of them, from the last committed checkpoint, when a rank is
lost; and an end in good order when the run is asked to stop.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, get_type_hints

from prefect import flow, runtime
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger

from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.resume_point import ResumePoint, no_intact_checkpoint
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.errors import (
    LaunchError,
    RankFailed,
    Stalled,
    Stopped,
    TrialError,
)
from trial_core.retention.claims import running
from trial_core.run.observer import current_observer
from trial_core.run.run_dirs import clear_kept, clear_leftovers, locked_run_dir, trial_id
from trial_core.run.sequencer import (
    Checkpoint,
    Finish,
    Train,
    Validate,
    has_more_to_do,
    next_workload,
)
from trial_core.run.stop_request import StopHandler
from trial_core.slots.accelerators import resolve_slot_count
from trial_core.slots.group import SlotGroup
from trial_core.units import in_batches
from trialflow.flows.lifecycle.crash_limit import refuse_if_crashed_too_often
from trialflow.flows.lifecycle.gpu_slots import gpu_slots
from trialflow.flows.lifecycle.restarts import Restarts
from trialflow.flows.lifecycle.stop_watch import LOOK_SECONDS, StopWatch
from trialflow.flows.uploads import Uploads
from trialflow.tasks.build import build_loaders, build_trial, fetch_checkpoint
from trialflow.tasks.callbacks import run_callbacks
from trialflow.tasks.checkpoint import checkpoint_save, checkpoint_upload, sweep_leftovers
from trialflow.tasks.report import Report
from trialflow.tasks.run import TrialRun
from trialflow.tasks.run_files import upload_run_files
from trialflow.tasks.train_workload import train_workload
from trialflow.tasks.validate import validate


@dataclass(frozen=True)
class TrialResult:
    """How a run of the flow ended.

    Attributes:
        trial: the trial's id; give it to the flow again to go on.
        batches_trained: over all runs of the trial.
        stopped_early: whether it ended before its maximum length, or its last validation.
        stop_reason: why, if somebody else than the trial asked for it.
        training_metrics, validation_metrics: the last ones.
        checkpoint_uuid: the newest committed checkpoint.
        checkpoint_url: where its files are.
        tensorboard_url: where the trial's files for TensorBoard are, if it writes any.
        report_path: the report, as a Markdown file.
        run_dir: the trial's folder on this machine, with its logs.
        flow_run_id: Prefect's id of this run.
    """

    trial: str
    batches_trained: int
    stopped_early: bool
    stop_reason: str | None = None
    training_metrics: dict[str, Any] = field(default_factory=dict)
    validation_metrics: dict[str, Any] = field(default_factory=dict)
    checkpoint_uuid: str | None = None
    checkpoint_url: str | None = None
    tensorboard_url: str | None = None
    report_path: str | None = None
    run_dir: str | None = None
    flow_run_id: str | None = None


@flow(name="train", flow_run_name="{config.name}", validate_parameters=True)
def train(config: ExperimentConfig, trial: str | None = None) -> TrialResult | State[Any]:
    """Train a trial. A run that is asked to stop saves first, and then ends as Prefect has it.

    Args:
        config: the experiment.
        trial: id of a trial to go on with, from its last committed checkpoint; by default the
            flow run's own, so that a retry of the flow run goes on as well.
    """
    flow_run_id = str(runtime.flow_run.id)
    trial = trial or trial_id(config.name, flow_run_id)
    settings = config.stopping
    refuse_if_crashed_too_often(config.max_restarts)
    refuse_missing_code(config)
    with (
        gpu_slots(config) as devices,
        StopHandler(settings.grace_seconds) as stopping,
        StopWatch(stopping, settings.time_budget_seconds) as watch,
    ):
        result = watch.concluding(lambda: train_trial(config, trial, stopping, devices))
    if isinstance(result, State):
        return result
    return replace(result, flow_run_id=flow_run_id)


# What flow.serve() pickles has no names of this module, which the annotations are read in.
train.fn.__annotations__ = get_type_hints(train.fn)


def refuse_missing_code(config: ExperimentConfig) -> None:
    """Before the run waits for accelerators, and keeps others from them, which it cannot use.

    Raises:
        LaunchError: this machine has no such folder.
    """
    if not config.code.is_dir():
        raise LaunchError(
            f"there is no code folder {config.code} on {socket.gethostname()}: it must be under "
            "that path on the machine that trains (a shared file system, a checkout in the same "
            "place, an image that holds it)"
        )


def train_trial(
    config: ExperimentConfig, trial: str, stopping: StopHandler, devices: Mapping[str, str]
) -> TrialResult:
    """Train a trial to its end, or until it is asked to stop; restart ranks that fail.

    Args:
        devices: variables for the ranks that say which accelerators are this run's.

    Raises:
        RankFailed, Stalled: once too often.
        Stopped: the run was asked to stop, and there was nothing to save yet, or no time to.
    """
    store = CheckpointStore(config.checkpoint_storage.url, config.checkpoint_storage.options)
    store.check_writable()
    restarts = Restarts(config.max_restarts)
    with (
        locked_run_dir(trial, patience(config)) as run_dir,
        Report(config, trial, run_dir, current_observer(), store, stopping) as report,
        running(store, trial, config.searcher.source_checkpoint_uuid) as claim,
    ):
        # Once, and not for each restart: that would win against a run that has come since.
        fence = store.take_over(trial, str(runtime.flow_run.id))
        while True:
            run = TrialRun(config, trial, run_dir, store, report, stopping, claim, fence, devices)
            sweep_leftovers(run)
            try:
                # In this order: an upload ends with the ranks, or (memory://) soon after them.
                with Uploads(run) as uploads, launch_slots(run) as run.slots, obeying(run):
                    result = follow_schedule(run, uploads)
            except (RankFailed, Stalled) as failure:
                get_run_logger().error("%s", failure.report())
                if stopping.request is not None:
                    raise Stopped(f"{stopping.request}, and while it saved: {failure}") from failure
                if not restarts.has_another(failure, run):
                    raise
                report.restarting(str(failure), restarts.count, restarts.limit)
                clear_leftovers(run_dir)
                if stopping.wait(restarts.pause_seconds):
                    raise Stopped(f"{stopping.request}, and no ranks ran") from failure
            else:
                if not result.stopped_early:
                    clear_kept(run_dir)
                report.ended(_how_it_ended(result), result.tensorboard_url)
                return replace(result, report_path=str(report.path))


def _how_it_ended(result: TrialResult) -> str:
    if not result.stopped_early:
        return "completed"
    return f"stopped: {result.stop_reason}" if result.stop_reason else "stopped"


def patience(config: ExperimentConfig) -> float:
    """How long to wait for an attempt that was taken for dead: it notices, and ends."""
    if runtime.deployment.id is None:
        return 0.0
    return config.stopping.grace_seconds + 2 * LOOK_SECONDS


def launch_slots(run: TrialRun) -> SlotGroup:
    """Start the ranks of `run`: a context manager, at whose end none of them is left."""
    variables = {**run.config.environment.environment_variables, **run.devices}
    return SlotGroup(
        resolve_slot_count(run.config.resources.slots_per_trial, {**os.environ, **variables}),
        working_dir=run.config.code,
        log_dir=run.run_dir / "logs",
        environment=variables,
        on_batches=run.observer.batches_trained,
        on_log=run.observer.rank_logged,
        should_abort=lambda: run.stopping.request is not None,
    )


@contextmanager
def obeying(run: TrialRun) -> Iterator[None]:
    """While the block runs, its ranks do what a stop asks of them."""

    def stop() -> None:
        if run.can_save:
            run.slots.stop()
        else:
            run.slots.abort(f"{run.stopping.request}, before there was anything to save")

    def end() -> None:
        run.slots.abort(f"{run.stopping.request}, and ended before all was saved")

    with run.stopping.subscribed(stop, end):
        yield


def follow_schedule(run: TrialRun, uploads: Uploads) -> TrialResult:
    """Train `run`'s trial on its slots: what the sequencer says, one stage after the other.

    Raises:
        TrialError: the trial does not report the searcher's metric. What it has learnt is saved.
    """
    schedule = run.config.schedule()
    build_trial(run)
    start = fetch_start(run)
    progress = start.progress
    run_callbacks(
        run, "on_trial_startup", progress.batches_trained,
        first_batch_idx=progress.batches_trained, checkpoint_uuid=start.uuid,
    )  # fmt: skip
    epoch = build_loaders(run, start)
    end = in_batches(schedule.max_length, epoch)
    run.observer.run_started(run.trial, end, progress.batches_trained, run.batch_samples)
    run_callbacks(run, "on_training_start", progress.batches_trained)
    uploads.newest = start.checkpoint if progress.batches_trained else None
    mistake: TrialError | None = None

    run.can_save = True
    while not isinstance(work := next_workload(progress, schedule, epoch), Finish):
        trained = progress.batches_trained
        if isinstance(work, Train):
            reached = train_workload(run, trained, work.until)
            progress = progress.after_training(reached)
            if reached > trained:
                run_callbacks(run, "on_training_workload_end", reached)
        elif isinstance(work, Validate):
            metric = None
            try:
                metric = validate(run, trained)
            except TrialError as error:
                mistake = error  # raised once what has been trained is saved
            if metric is not None:
                progress = progress.after_validation(metric, schedule.smaller_is_better)
            if metric is not None or mistake is not None:  # it was not broken off
                run_callbacks(run, "on_validation_end", trained)
        elif isinstance(work, Checkpoint):
            if not uploads.have_room(work.is_optional):
                progress = progress.skipping_checkpoint()
                continue
            staged = checkpoint_save(run, progress)
            run_callbacks(run, "on_checkpoint_write_end", trained)
            run_callbacks(run, "on_checkpoint_end", trained)
            uploads.start(checkpoint_upload.submit(run, staged))
            progress = progress.after_checkpoint()
        uploads.settle()
        progress = progress.stopping(run.is_to_stop or mistake is not None)

    uploads.finish()
    run_callbacks(run, "on_trial_shutdown", progress.batches_trained)
    tensorboard = upload_run_files(run, progress.batches_trained) if run.writes_run_files else None
    if mistake is not None:
        raise mistake
    newest = uploads.newest
    return TrialResult(
        trial=run.trial,
        batches_trained=progress.batches_trained,
        stopped_early=has_more_to_do(progress, schedule, epoch),
        stop_reason=str(run.stopping.request) if run.stopping.request else None,
        training_metrics=run.metrics.get("training", {}),
        validation_metrics=run.metrics.get("validation", {}),
        checkpoint_uuid=newest.uuid if newest else None,
        checkpoint_url=run.store.files_url(newest.uuid) if newest else None,
        tensorboard_url=tensorboard,
        run_dir=str(run.run_dir),
    )


def fetch_start(run: TrialRun) -> ResumePoint:
    """Bring what the trial starts from to the ranks: its own newest undamaged checkpoint; for a
    trial that has saved nothing yet the one that the experiment names; else nothing.

    Raises:
        CheckpointDamaged: all of its own are, or the one that the experiment names.
        StorageError: the storage does not give one. It may be whole, so none takes its place.
    """
    tried: list[ResumePoint] = []
    for manifest in run.store.candidates(run.trial):
        tried.append(start := ResumePoint.continuing(manifest))
        if (damage := fetch(run, start, manifest)) is None:
            run.metrics = start.metrics
            return start
    if tried:
        raise no_intact_checkpoint(tried, str(damage))
    source = run.config.searcher.source_checkpoint_uuid
    if source is None:
        return ResumePoint()
    manifest = run.store.open(source)
    start = ResumePoint.warm(manifest, run.config.searcher.source_weights_only)
    if damage := fetch(run, start, manifest):
        raise no_intact_checkpoint([start], damage)
    return start


def fetch(run: TrialRun, start: ResumePoint, manifest: Manifest) -> str | None:
    """Bring what `start` restores to the ranks; what is wrong with it, if something is."""
    if run.topology is not None:
        start.require_convertible(run.topology)
    run.claim.needs(manifest.uuid)  # before: it must not be pruned while it is fetched
    return fetch_checkpoint(run, manifest, restore=start.restore)
