"""What a run does next, decided from its progress and its schedule alone. Pure.

The flow, `Trainer.fit` and a resumed run call `next_workload` and so make the same decisions. At
every batch where something is due the order is: train up to it, validate, then checkpoint. One
monotone counter, `Progress.batches_trained`, drives every period.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from trial_core.units import EpochLength, TrainUnit, in_batches

CheckpointPolicy = Literal["best", "all", "none"]


@dataclass(frozen=True)
class Schedule:
    """When a run reports, validates, saves and ends.

    Attributes:
        max_length: where training ends; exactly there, whatever the other periods are.
        reporting_period: a train-workload is at most this long; its end reports training metrics.
        validation_period: when to validate; besides, every run validates at its end.
        checkpoint_period: when to save; besides, every run saves at its end.
        checkpoint_policy: whether a validation leads to a checkpoint: after the ``best`` one so
            far, after ``all``, or after ``none``.
        smaller_is_better: which way the searcher's metric improves.
        step_zero_validation: validate once before the first batch.
    """

    max_length: TrainUnit
    reporting_period: TrainUnit
    validation_period: TrainUnit | None = None
    checkpoint_period: TrainUnit | None = None
    checkpoint_policy: CheckpointPolicy = "best"
    smaller_is_better: bool = True
    step_zero_validation: bool = False


@dataclass(frozen=True)
class Progress:
    """How far a run has come. Travels in every checkpoint's manifest.

    Attributes:
        batches_trained: batches trained since the start of the trial, over all its attempts.
        validated_at: `batches_trained` at the last validation, None before any.
        checkpointed_at: `batches_trained` at the last checkpoint, None before any.
        best_metric: the searcher metric's best value so far.
        improved: whether the last validation is the best so far.
        stop_requested: whether somebody asked the run to save and end.
        skipped_at: `batches_trained` at the last checkpoint that was due and not saved.
    """

    batches_trained: int = 0
    validated_at: int | None = None
    checkpointed_at: int | None = None
    best_metric: float | None = None
    improved: bool = False
    stop_requested: bool = False
    skipped_at: int | None = None

    def after_training(self, batches_trained: int) -> Progress:
        """Progress once training has reached `batches_trained`."""
        return replace(self, batches_trained=batches_trained)

    def after_validation(self, metric: float | None, smaller_is_better: bool) -> Progress:
        """Progress once validated; a NaN, or no metric at all, is never an improvement."""
        improved = (
            metric is not None
            and not math.isnan(metric)
            and (
                self.best_metric is None
                or (metric < self.best_metric if smaller_is_better else metric > self.best_metric)
            )
        )
        return replace(
            self,
            validated_at=self.batches_trained,
            best_metric=metric if improved else self.best_metric,
            improved=improved,
            # A checkpoint that was saved before this validation does not know of it.
            checkpointed_at=(
                None if self.checkpointed_at == self.batches_trained else self.checkpointed_at
            ),
        )

    def after_checkpoint(self) -> Progress:
        """Progress once a checkpoint of this very state exists."""
        return replace(self, checkpointed_at=self.batches_trained)

    def skipping_checkpoint(self) -> Progress:
        """Progress once a checkpoint that was due has been left out."""
        return replace(self, skipped_at=self.batches_trained)

    def stopping(self, stop_requested: bool = True) -> Progress:
        """Progress once somebody has asked for a stop; `False` forgets that they did."""
        return replace(self, stop_requested=stop_requested)


@dataclass(frozen=True)
class Train:
    """Train until `until` batches have been trained in all."""

    until: int


@dataclass(frozen=True)
class Validate:
    """Validate on the whole validation set."""


@dataclass(frozen=True)
class Checkpoint:
    """Save a checkpoint.

    Attributes:
        is_optional: whether it is due only because a period is over, and the next one will do.
    """

    is_optional: bool = False


@dataclass(frozen=True)
class Finish:
    """Nothing is left to do."""


Workload = Train | Validate | Checkpoint | Finish


def next_workload(
    progress: Progress, schedule: Schedule, epoch: EpochLength | None = None
) -> Workload:
    """The next thing a run does.

    Args:
        epoch: the epoch's length; None when the loader has none, which refuses epoch periods.
    """
    end = in_batches(schedule.max_length, epoch)
    if not progress.stop_requested and _must_validate(progress, schedule, epoch, end):
        return Validate()
    if _must_checkpoint(progress, schedule, end):
        return Checkpoint()
    if _may_checkpoint(progress, schedule, epoch):
        return Checkpoint(is_optional=True)
    if progress.stop_requested or progress.batches_trained >= end:
        return Finish()
    return Train(_next_stop(progress.batches_trained, schedule, epoch, end))


def has_more_to_do(progress: Progress, schedule: Schedule, epoch: EpochLength | None) -> bool:
    """Whether there would be more to do, had nobody asked for a stop."""
    return not isinstance(next_workload(progress.stopping(False), schedule, epoch), Finish)


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
    if trained == 0 or trained in (progress.checkpointed_at, progress.skipped_at):
        return False
    return period is not None and period.is_due(trained, epoch)


def _next_stop(trained: int, schedule: Schedule, epoch: EpochLength | None, end: int) -> int:
    periods = (schedule.reporting_period, schedule.validation_period, schedule.checkpoint_period)
    stop = end
    for period in periods:
        if period is not None:
            # Never past what is due already: a container is searched batch by batch.
            stop = period.next_due(trained, stop, epoch) or stop
    return stop
