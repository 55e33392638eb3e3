"""The run loop: executes the stages of a run in the order that the sequencer decides.

The driver of every run executes it (`driver/launch_stages.py`), of flows and of scripts. The hooks
in their places::

    fetch the resume point
    on_trial_startup
    build the loaders
    on_training_start
    find the names of the validation metrics, if the searcher metric may be missing
    until the sequencer says that the run is finished:
        train           on_training_workload_end; the run ends if its losses stay non-finite
        validate        on_validation_end, then the metrics are reported
        save            on_checkpoint_write_end, on_checkpoint_end
                        (the upload runs beside training; on_checkpoint_upload_end follows it)
    wait for the upload
    on_trial_shutdown

The whole route of a stop: `trial_core/schedule/stop_requests.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from logging import Logger, LoggerAdapter
from typing import Any, Protocol

from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.staged_checkpoint import StagedCheckpoint
from trial_core.config import ExperimentConfig
from trial_core.driver.choose_resume_point import fetch_first_intact
from trial_core.errors import TrialError
from trial_core.schedule.searcher_metric import not_reported
from trial_core.schedule.sequencer import (
    Checkpoint,
    Finish,
    Progress,
    Schedule,
    Train,
    Validate,
    Workload,
    has_more_to_do,
    next_workload,
)
from trial_core.schedule.units import EpochLength, in_batches


@dataclass(frozen=True)
class TrialResult:
    """How a run ended. Fields of a flow run are None after `Trainer.fit`.

    Attributes:
        trial: the trial's id; give it to the flow again to continue the trial.
        batches_trained: over all runs of the trial.
        stopped_early: whether the run ended before its maximum length, or its last validation.
        stop_reason: why the flow run was stopped; None if the trial requested the stop.
        training_metrics, validation_metrics: the last ones.
        validated_at: the batch of the last validation; None: there was none.
        checkpoint_uuid: the trial's newest committed checkpoint.
        checkpoint_url: where the files are that it has stored itself; `fetch` gets all.
        tensorboard_url: where the flow run's files for TensorBoard are, if the trial writes any.
        report_path: the flow run's report, as a Markdown file.
        run_dir: the flow run's folder on this machine, with its logs.
        flow_run_id: Prefect's id of the flow run.
        ledger: the trial's ledger of time until then, as `trialflow runs show --json` prints it.
        trial_stop_reason: why the trial requested a stop, if it says so.
        checkpoint_at: how many batches were trained when the checkpoint was saved.
        throughput: the run's average over its train-workloads: batches_per_second,
            samples_per_second, tokens_per_second, mfu; and peak_memory_bytes, by rank. None: not
            known.
        config: the flow run's experiment, with which later flows and tasks find the checkpoint.
    """

    trial: str
    batches_trained: int
    stopped_early: bool
    stop_reason: str | None = None
    training_metrics: dict[str, Any] = field(default_factory=dict)
    validation_metrics: dict[str, Any] = field(default_factory=dict)
    validated_at: int | None = None
    checkpoint_uuid: str | None = None
    checkpoint_url: str | None = None
    tensorboard_url: str | None = None
    report_path: str | None = None
    run_dir: str | None = None
    flow_run_id: str | None = None
    ledger: dict[str, Any] | None = None
    trial_stop_reason: str | None = None
    checkpoint_at: int | None = None
    throughput: dict[str, Any] | None = None
    config: ExperimentConfig | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Validation:
    """A finished validation.

    Attributes:
        metric: the searcher metric; None if the run has none.
        mistake: the error to raise once the run has saved, if the trial does not report the
            searcher metric.
    """

    metric: float | None = None
    mistake: TrialError | None = None


class RunStages(Protocol):
    """The stages of one launch of a run.

    Attributes:
        store: the trial's checkpoint storage.
        metrics: the last metrics of each kind.
        metric: the name of the searcher metric; None if the run has none.
        postpones_when_busy: whether to postpone an optional checkpoint during an upload
            (`checkpointing.when_busy`).
        how_to_go_on: what to do with a trial that has reached its maximum length.
    """

    trial: str
    store: CheckpointStore
    logger: Logger | LoggerAdapter[Any]
    metrics: dict[str, dict[str, Any]]
    metric: str | None
    postpones_when_busy: bool
    how_to_go_on: str

    @property
    def newest_checkpoint(self) -> str | None:
        """The uuid of the newest checkpoint that this run has committed."""

    @property
    def saved_at(self) -> int | None:
        """Batches trained at the last checkpoint that the trial can continue from; None: none."""

    @property
    def is_uploading(self) -> bool:
        """Whether the last checkpoint is still being uploaded."""

    def resume_points(self) -> Iterable[ResumePoint]:
        """What the run may resume from, best first."""

    def fetch(self, point: ResumePoint) -> str | None:
        """Fetch and verify a resume point's checkpoint. Return what is damaged; None if intact."""

    def schedule(self, progress: Progress) -> Schedule:
        """The schedule of a run that resumes at `progress`."""

    def build_loaders(self, point: ResumePoint) -> EpochLength | None:
        """Build the loaders and restore the checkpoint. Return the length of an epoch."""

    def run_hook(self, hook: str, batches_trained: int, **arguments: Any) -> None:
        """Call one hook of every callback, if any callback overrides it."""

    def metric_names(self) -> list[str] | None:
        """The names of the validation metrics; None if only a validation can tell.

        Without metrics that callbacks add in `on_validation_end`.
        """

    @property
    def may_add_metrics(self) -> bool:
        """After `metric_names`: whether a callback may add others in `on_validation_end`."""

    def train(self, begin: int, until: int) -> int:
        """Train from batch `begin` to `until`. Return how many batches are trained in all."""

    def validate(self, batches_trained: int) -> bool:
        """Validate on the whole set. Return False if a stop request ended the validation early."""

    def report_validation(self, batches_trained: int) -> Validation:
        """Report the metrics of a finished validation, as on_validation_end has left them."""

    def loss_failure(self, batches_trained: int) -> TrialError | None:
        """After a train-workload: the error, if the run must end because of its losses."""

    def withholds_checkpoint(self, batches_trained: int) -> bool:
        """Whether to save nothing now, because the losses are not finite. Logs it."""

    def save(self, progress: Progress) -> StagedCheckpoint:
        """Stage a checkpoint. Training may continue when this returns."""

    def start_upload(self, staged: StagedCheckpoint) -> None:
        """Start to upload and commit a staged checkpoint, beside training."""

    def break_training_after_upload(self) -> None:
        """End the train-workload in progress as soon as the upload in progress has ended."""

    def finish_upload(self) -> None:
        """Wait for the upload, if there is one, and run its hook. Raises its error."""

    def poll(self) -> bool:
        """Between workloads: finish an ended upload. Return whether the run should stop."""

    def finish(self, batches_trained: int, stopped_early: bool) -> None:
        """After the last hook: wait for background work, and upload the remaining run files.

        Args:
            stopped_early: as of `TrialResult`.
        """


def follow_schedule(stages: RunStages) -> TrialResult:
    """Execute a run.

    Raises:
        TrialError: the trial does not report the searcher metric. Found before training, if one
            batch of the validation set tells; else what the trial has learnt is saved.
    """
    start = fetch_first_intact(stages.resume_points(), stages.fetch)
    if start.checkpoint is not None:
        stages.logger.info("starting from checkpoint %s", start.uuid)
    stages.metrics.clear()  # of batches that were lost with earlier ranks
    stages.metrics.update(start.metrics)
    progress = start.progress
    has_metric, at = stages.metric is not None, progress.batches_trained
    if has_metric and progress.best_metric is None and progress.validated_at == at:
        # That validation did not have the searcher metric, which may have been corrected.
        progress = replace(progress, validated_at=None)
    schedule = stages.schedule(progress)
    stages.run_hook(
        "on_trial_startup", progress.batches_trained,
        first_batch_idx=progress.batches_trained, checkpoint_uuid=start.uuid,
    )  # fmt: skip
    epoch = stages.build_loaders(start)
    stages.run_hook("on_training_start", progress.batches_trained)
    first = next_workload(progress, schedule, epoch)
    if isinstance(first, Finish):
        end = in_batches(schedule.max_length, epoch)
        stages.logger.info(
            "trial %s is already at %d of %d batches; %s",
            stages.trial, progress.batches_trained, end, stages.how_to_go_on,
        )  # fmt: skip
    mistake = _missing_metric(stages, first)
    if mistake is not None:
        progress = progress.stopping()

    while not isinstance(work := next_workload(progress, schedule, epoch), Finish):
        trained = progress.batches_trained
        if isinstance(work, Train):
            reached = stages.train(trained, work.until)
            progress = progress.after_training(reached)
            if reached > trained:
                stages.run_hook("on_training_workload_end", reached)
                mistake = stages.loss_failure(reached)
        elif isinstance(work, Validate):
            if stages.validate(trained):
                stages.run_hook("on_validation_end", trained)
                validation = stages.report_validation(trained)
                mistake = validation.mistake  # raised once what has been trained is saved
                progress = progress.after_validation(validation.metric, schedule.smaller_is_better)
        elif isinstance(work, Checkpoint):
            if stages.withholds_checkpoint(trained):
                progress = progress.after_checkpoint()  # as if there were nothing to save
                continue
            if not _has_room(stages, work, schedule, progress):
                progress = progress.postponing_checkpoint()
                continue
            staged = stages.save(progress)
            stages.run_hook("on_checkpoint_write_end", trained)
            stages.run_hook("on_checkpoint_end", trained)
            stages.start_upload(staged)
            progress = progress.after_checkpoint()
        progress = progress.stopping(stages.poll() or mistake is not None)

    stages.finish_upload()
    stages.run_hook("on_trial_shutdown", progress.batches_trained)
    stopped_early = has_more_to_do(progress, schedule, epoch)
    stages.finish(progress.batches_trained, stopped_early)
    if mistake is not None:
        raise mistake
    newest = stages.newest_checkpoint or (start.uuid if start.restore == "everything" else None)
    return TrialResult(
        trial=stages.trial,
        batches_trained=progress.batches_trained,
        stopped_early=stopped_early,
        training_metrics=stages.metrics.get("training", {}),
        validation_metrics=stages.metrics.get("validation", {}),
        validated_at=progress.validated_at,
        checkpoint_uuid=newest,
        checkpoint_at=stages.saved_at,
        checkpoint_url=stages.store.files_url(newest) if newest else None,
    )


def _missing_metric(stages: RunStages, first: Workload) -> TrialError | None:
    """The error, if it is certain before the first workload that the searcher metric is missing."""
    metric = stages.metric
    is_known = metric in stages.metrics.get("validation", {})
    if metric is None or is_known or not isinstance(first, Train):
        return None
    names = stages.metric_names()
    if names is None or metric in names:
        return None
    error = not_reported(metric, names)
    if stages.may_add_metrics:
        stages.logger.warning("%s, or add it in on_validation_end, as a callback may do", error)
        return None
    return error


def _has_room(
    stages: RunStages, checkpoint: Checkpoint, schedule: Schedule, progress: Progress
) -> bool:
    """Whether to save now: one upload runs at a time. Waits for it, or postpones the save."""
    if stages.is_uploading:
        if checkpoint.is_optional and schedule.checkpoint_period == "continuous":
            return False  # the end of the upload ends the next train-workload
        if checkpoint.is_optional and stages.postpones_when_busy:
            if progress.postponed_at is None:
                stages.logger.info(
                    "the checkpoint at batch %d is postponed: the last one is still being uploaded",
                    progress.batches_trained,
                )  # fmt: skip
                stages.break_training_after_upload()
            return False
        stages.logger.info("training waits: the last checkpoint is still being uploaded")
    stages.finish_upload()
    return True
