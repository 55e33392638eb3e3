"""Decides the next workload of a run from its progress and schedule alone. Pure.

The run loop calls `next_workload` for the flow and for `Trainer.fit`, also after a resume. So all
runs make the same decisions.
At a batch where several workloads are due, the order is: train, validate, save. One monotone
counter, `Progress.batches_trained`, drives every period.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from trial_core.common.text_format import is_number
from trial_core.errors import TrialError
from trial_core.schedule.units import EpochLength, TrainUnit, in_batches

CheckpointPolicy = Literal["best", "all", "none"]
Continuous = Literal["continuous"]

MAX_TASKS = 50
"""Tasks that can be told apart in the timeline of a run."""

OTHER_TASKS = 10
"""The share of `MAX_TASKS` for the stages before training and the first, short train-workloads."""

TASKS_PER_STOP = 3
"""Tasks that a due validation or checkpoint adds: it ends a train-workload, and saving has two."""

MIN_REPORTS = 10
"""Workloads in a run that validates or saves so often that `MAX_TASKS` are exceeded anyway."""

SHORTEST = 10
"""Batches of the first workload; after it, the first training metrics are seen."""

LONGEST = 10_000
"""Batches. A rank keeps the metrics of a workload's batches until its end, some hundred bytes each.
"""


@dataclass(frozen=True)
class Schedule:
    """When a run reports, validates, saves and ends.

    Attributes:
        max_length: training ends exactly here.
        reporting_period: maximum length of a train-workload, which reports training metrics. None
            means automatic, see `_automatic_stop`.
        validation_period: when to validate, in addition to the end.
        checkpoint_period: when to save, in addition to the end. ``continuous`` saves after each
            train-workload unless an upload is in progress; the end of an upload ends a workload.
        checkpoint_policy: which validations lead to a checkpoint.
        step_zero_validation: True to validate once before the first batch.
        pause_at: the run validates, saves and ends here; a later run trains further. None: at
            `max_length`.
    """

    max_length: TrainUnit
    reporting_period: TrainUnit | None = None
    validation_period: TrainUnit | None = None
    checkpoint_period: TrainUnit | Continuous | None = None
    checkpoint_policy: CheckpointPolicy = "best"
    smaller_is_better: bool = True
    step_zero_validation: bool = False
    pause_at: TrainUnit | None = None


@dataclass(frozen=True)
class Progress:
    """How far a trial is. Every checkpoint's manifest has it.

    Attributes:
        batches_trained: batches trained since the start of the trial, in all its attempts.
        validated_at: `batches_trained` at the last validation, None before any.
        checkpointed_at: `batches_trained` at the last checkpoint, None before any.
        best_metric: of the searcher metric.
        improved: True if the last validation was the best so far.
        postponed_at: `batches_trained` when an upload last kept a checkpoint from being saved, 0 if
            one was refused; None if the last one that was due is saved.
        extra_samples: samples trained beyond `batches_trained` times the samples of a batch: not 0
            if batches have had another size, negative if a smaller one, as at the end of a pass.
    """

    batches_trained: int = 0
    validated_at: int | None = None
    checkpointed_at: int | None = None
    best_metric: float | None = None
    improved: bool = False
    stop_requested: bool = False
    postponed_at: int | None = None
    extra_samples: int = 0

    def after_training(self, batches_trained: int, extra_samples: int = 0) -> Progress:
        extra = self.extra_samples + extra_samples
        return replace(self, batches_trained=batches_trained, extra_samples=extra)

    def after_validation(self, metric: float | None, smaller_is_better: bool) -> Progress:
        """The progress after a validation; only a finite number is an improvement."""
        best = self.best_metric
        if best is not None and not math.isfinite(best):  # of an earlier version
            best = None
        improved = (
            metric is not None
            and math.isfinite(metric)
            and (best is None or (metric < best if smaller_is_better else metric > best))
        )
        return replace(
            self,
            validated_at=self.batches_trained,
            best_metric=metric if improved else best,
            improved=improved,
            # A checkpoint saved before this validation does not contain it.
            checkpointed_at=(
                None if self.checkpointed_at == self.batches_trained else self.checkpointed_at
            ),
        )

    def after_checkpoint(self) -> Progress:
        return replace(self, checkpointed_at=self.batches_trained, postponed_at=None)

    def postponing_checkpoint(self) -> Progress:
        """The progress after a due checkpoint was postponed: it is due after the next workload."""
        return replace(self, postponed_at=self.batches_trained)

    def after_refusal(self, refused: Progress) -> Progress:
        """The progress after the checkpoint at `refused` was not stored: one is due at once.

        If that one was the best, and its state is gone, the next validation counts as the best.
        """
        was_best = refused.improved and refused.validated_at == refused.batches_trained
        is_gone = self.batches_trained > refused.batches_trained
        best = self.best_metric
        if was_best and is_gone and best == refused.best_metric:
            best = None
        return replace(self, checkpointed_at=None, postponed_at=0, best_metric=best)

    def stopping(self, stop_requested: bool = True) -> Progress:
        """The progress after a stop request; `False` clears it."""
        return replace(self, stop_requested=stop_requested)


@dataclass(frozen=True)
class Train:
    """Train until this batch of the trial."""

    until: int


@dataclass(frozen=True)
class Validate:
    """Validate on the whole validation set."""


@dataclass(frozen=True)
class Checkpoint:
    """Save a checkpoint. `is_optional`: it is only periodic, so it may be postponed."""

    is_optional: bool = False


@dataclass(frozen=True)
class Finish:
    """The run has ended."""


Workload = Train | Validate | Checkpoint | Finish


def next_workload(
    progress: Progress, schedule: Schedule, epoch: EpochLength | None = None
) -> Workload:
    """Decide the next workload of a run.

    Raises ConfigError if a period is in epochs, but `epoch` is None: the loader has no length.
    """
    end = last = in_batches(schedule.max_length, epoch)
    if schedule.pause_at is not None:
        last = min(end, in_batches(schedule.pause_at, epoch))
    if not progress.stop_requested and _must_validate(progress, schedule, epoch, last):
        return Validate()
    if _must_checkpoint(progress, schedule, last):
        return Checkpoint()
    if _may_checkpoint(progress, schedule, epoch):
        return Checkpoint(is_optional=True)
    if progress.stop_requested or progress.batches_trained >= last:
        return Finish()
    return Train(min(_next_stop(progress.batches_trained, schedule, epoch, end), last))


def has_more_to_do(progress: Progress, schedule: Schedule, epoch: EpochLength | None) -> bool:
    """True if the trial would be trained further without the stop request and the pause."""
    schedule = replace(schedule, pause_at=None)
    return not isinstance(next_workload(progress.stopping(False), schedule, epoch), Finish)


def is_paused(progress: Progress, schedule: Schedule, epoch: EpochLength | None) -> bool:
    """True if the run has validated and ends at `Schedule.pause_at`, before the end of training."""
    pause = schedule.pause_at
    return (
        pause is not None
        and in_batches(pause, epoch) <= progress.batches_trained == progress.validated_at
        and progress.batches_trained < in_batches(schedule.max_length, epoch)
    )


def _must_validate(
    progress: Progress, schedule: Schedule, epoch: EpochLength | None, end: int
) -> bool:
    trained = progress.batches_trained
    if progress.validated_at == trained:
        return False
    if trained == 0:
        return schedule.step_zero_validation
    period = schedule.validation_period
    return trained >= end or (period is not None and period.is_due(trained, epoch))


def _must_checkpoint(progress: Progress, schedule: Schedule, end: int) -> bool:
    trained = progress.batches_trained
    if trained == 0 or progress.checkpointed_at == trained:
        return False
    if trained >= end or progress.stop_requested:
        return True
    if progress.validated_at != trained:
        return False
    policy = schedule.checkpoint_policy
    return policy == "all" or (policy == "best" and progress.improved)


def _may_checkpoint(progress: Progress, schedule: Schedule, epoch: EpochLength | None) -> bool:
    trained, period = progress.batches_trained, schedule.checkpoint_period
    if trained == 0 or trained in (progress.checkpointed_at, progress.postponed_at):
        return False
    if isinstance(period, str) or progress.postponed_at is not None:
        return True
    return period is not None and period.is_due(trained, epoch)


def _next_stop(trained: int, schedule: Schedule, epoch: EpochLength | None, end: int) -> int:
    reports = schedule.reporting_period
    asked_for = (schedule.validation_period, schedule.checkpoint_period)
    due = [period for period in asked_for if period is not None and not isinstance(period, str)]
    stop = end
    for period in due if reports is None else [reports, *due]:
        # Only up to the nearest stop so far: containers are searched batch by batch.
        stop = period.next_due(trained, stop, epoch) or stop
    return _automatic_stop(trained, stop, end, due, epoch) if reports is None else stop


def _automatic_stop(
    trained: int,
    next_due: int,
    end: int,
    periods: Sequence[TrainUnit],
    epoch: EpochLength | None,
) -> int:
    """The end of the train-workload that begins at batch `trained`, by which a person can follow
    the timeline. Between two batches at which validations or checkpoints are due::

        0  10  20  40    100       200       300       400  437
        |---|---|----|-----|---------|---------|-----------|
        the first ones are short      then each has the length `unit`; a short rest joins the last

    At `next_due`, one of the `periods` of validations and checkpoints ends, or training, at `end`.
    """
    unit = _workload_length(end, periods, epoch)
    stop = SHORTEST
    while stop <= trained:
        stop *= 2
    if stop > unit // 2:
        begin = max((period.last_due(trained, epoch) for period in periods), default=0)
        stop = begin + ((trained - begin) // unit + 1) * unit
    return stop if next_due - stop >= unit / 2 else next_due


def _workload_length(end: int, periods: Sequence[TrainUnit], epoch: EpochLength | None) -> int:
    """The length of a workload: 1, 2 or 5 times a power of ten."""
    stops = 1 + sum(period.times_due(end, epoch) for period in periods)
    reports = max(MAX_TASKS - OTHER_TASKS - TASKS_PER_STOP * stops, MIN_REPORTS)
    unit = SHORTEST
    while unit * reports < end and unit < LONGEST:
        # 10, 20, 50, 100, …
        unit = unit * 5 // 2 if str(unit).startswith("2") else unit * 2
    return unit


def searcher_metric(metrics: Mapping[str, Any], name: str) -> float:
    """The value of the searcher metric `name`. Raises TrialError if it is missing or no number."""
    if name not in metrics:
        raise not_reported(name, metrics)
    if not is_number(value := metrics[name]):
        raise TrialError(
            f'searcher.metric "{name}" must be a number, but the trial reports {value!r}'
        )
    return float(value)


def not_reported(name: str, reported: Iterable[str]) -> TrialError:
    """The error for a trial that reports other validation metrics than `name`."""
    return TrialError(
        f'searcher.metric "{name}" is not among the validation metrics that the trial reports: '
        f"{', '.join(sorted(reported)) or 'none'}. Set searcher.metric to one of these, or report "
        f'"{name}" in the trial\'s validation'
    )
