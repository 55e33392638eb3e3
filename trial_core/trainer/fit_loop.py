"""A whole run in a script of the user's own: every rank takes the same decisions, none is driven.

`follow_schedule` is the story of `trialflow.flows.train`, told by ranks that have no driver; a test holds the
two together. The stages are in `trial_core.trainer.fit_stages`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trial_core.checkpoint.resume_point import ResumePoint
from trial_core.errors import TrialError
from trial_core.run.sequencer import (
    Checkpoint,
    Finish,
    Progress,
    Schedule,
    Train,
    Validate,
    has_more_to_do,
    next_workload,
)
from trial_core.trainer.fit_stages import FitStages
from trial_core.units import Batch


@dataclass(frozen=True)
class FitResult:
    """How a fit ended; the same on every rank.

    Attributes:
        trial: the trial's id.
        batches_trained: over all runs of the trial.
        stopped_early: whether it ended before its maximum length, or its last validation: the
            trial asked for it, or SIGTERM.
        training_metrics, validation_metrics: the last ones.
        checkpoint_uuid: the newest committed checkpoint; give it to `fit` to go on.
        checkpoint_url: where its files are.
    """

    trial: str
    batches_trained: int
    stopped_early: bool
    training_metrics: dict[str, Any] = field(default_factory=dict)
    validation_metrics: dict[str, Any] = field(default_factory=dict)
    checkpoint_uuid: str | None = None
    checkpoint_url: str | None = None


def follow_schedule(fit: FitStages, schedule: Schedule, starts: list[ResumePoint]) -> FitResult:
    """Train: what the sequencer says, one stage after the other. Collective: every rank calls this.

    Args:
        starts: what the run may start from, best first.

    Raises:
        TrialError: the trial does not report the searcher's metric. What it has learnt is saved.
    """
    start = fit.fetch_start(starts)
    progress = start.progress
    fit.run_hook(
        "on_trial_startup", first_batch_idx=progress.batches_trained, checkpoint_uuid=start.uuid
    )
    epoch = fit.build_loaders(start)
    if fit.test_mode:
        schedule = one_batch_after(progress)
    fit.run_hook("on_training_start")
    mistake: TrialError | None = None

    while not isinstance(work := next_workload(progress, schedule, epoch), Finish):
        if isinstance(work, Train):
            trained = progress.batches_trained
            progress = progress.after_training(fit.train(trained, work.until))
            if progress.batches_trained > trained:
                fit.run_hook("on_training_workload_end")
        elif isinstance(work, Validate):
            if fit.validate(progress.batches_trained):
                try:
                    metric = fit.searcher_metric()
                except TrialError as error:
                    mistake = error  # raised once what has been trained is saved
                else:
                    progress = progress.after_validation(metric, schedule.smaller_is_better)
                fit.run_hook("on_validation_end")
        elif isinstance(work, Checkpoint):
            if not fit.has_room(work.is_optional):  # one upload at a time, beside training
                progress = progress.skipping_checkpoint()
                continue
            staged = fit.save(progress)
            fit.run_hook("on_checkpoint_write_end")
            fit.run_hook("on_checkpoint_end")
            fit.start_upload(staged)
            progress = progress.after_checkpoint()
        progress = progress.stopping(fit.settle() or mistake is not None)

    fit.finish_upload()
    fit.run_hook("on_trial_shutdown")
    fit.finish()
    if mistake is not None:
        raise mistake
    return FitResult(
        trial=fit.trial,
        batches_trained=progress.batches_trained,
        stopped_early=has_more_to_do(progress, schedule, epoch),
        training_metrics=fit.metrics.get("training", {}),
        validation_metrics=fit.metrics.get("validation", {}),
        checkpoint_uuid=fit.newest,
        checkpoint_url=fit.store.files_url(fit.newest) if fit.newest else None,
    )


def one_batch_after(progress: Progress) -> Schedule:
    """The schedule of a test: train one batch, validate, save."""
    end = Batch(progress.batches_trained + 1)
    return Schedule(max_length=end, reporting_period=end, checkpoint_policy="none")
