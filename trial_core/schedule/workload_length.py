"""The automatic length of train-workloads, by which a person can follow the timeline. Pure.

A function of the batch and the schedule alone, so a resumed run has the same workloads as an
uninterrupted one. Between two batches at which validations or checkpoints are due::

    0  10  20  40    100       200       300       400  437
    |---|---|----|-----|---------|---------|-----------|
    the first ones are short      then each has the length `unit`; a short rest joins the last one
"""

from __future__ import annotations

from collections.abc import Sequence

from trial_core.schedule.units import EpochLength, TrainUnit

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


def automatic_stop(
    trained: int,
    next_due: int,
    end: int,
    periods: Sequence[TrainUnit],
    epoch: EpochLength | None,
) -> int:
    """The end of the train-workload that begins at batch `trained`.

    Args:
        next_due: the next batch at which a validation or checkpoint is due, or training ends.
        end: where training ends.
        periods: of validations and checkpoints.
    """
    unit = _unit(end, periods, epoch)
    stop = SHORTEST
    while stop <= trained:
        stop *= 2
    if stop > unit // 2:
        begin = max((period.last_due(trained, epoch) for period in periods), default=0)
        stop = begin + ((trained - begin) // unit + 1) * unit
    return stop if next_due - stop >= unit / 2 else next_due


def _unit(end: int, periods: Sequence[TrainUnit], epoch: EpochLength | None) -> int:
    """The length of a workload: 1, 2 or 5 times a power of ten."""
    stops = 1 + sum(period.times_due(end, epoch) for period in periods)
    reports = max(MAX_TASKS - OTHER_TASKS - TASKS_PER_STOP * stops, MIN_REPORTS)
    unit = SHORTEST
    while unit * reports < end and unit < LONGEST:
        # 10, 20, 50, 100, …
        unit = unit * 5 // 2 if str(unit).startswith("2") else unit * 2
    return unit
