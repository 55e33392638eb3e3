"""Toy trials with every form of custom reducer. The values are samples' indices."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from parallel_trials import TensorParallelTrial
from toy_trial import ToyTrial

from trial_core.deepspeed import DeepSpeedTrialContext
from trial_core.pytorch import MetricReducer

# Updates of reducers in the wrong kind of workload: no index is so large.
STRAY = 1000.0


class Mean(MetricReducer):
    """The mean of all values, not of the ranks' means, as an array of one element."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total = torch.zeros(1)
        self.count = 0

    def update(self, values: list[float]) -> None:
        self.total += sum(values)
        self.count += len(values)

    def per_slot_reduce(self) -> tuple[torch.Tensor, int]:
        return self.total, self.count

    def cross_slot_reduce(self, per_slot_metrics: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
        totals, counts = zip(*per_slot_metrics, strict=True)
        return torch.stack(totals).sum(dim=0) / sum(counts)


class Remainders(MetricReducer):
    """Counts of remainders by 2 and by 3: two metrics, both arrays."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.counts = np.zeros((2, 3), dtype=int)

    def update(self, values: list[float]) -> None:
        for value in values:
            self.counts[int(value) % 2, int(value) % 3] += 1

    def per_slot_reduce(self) -> Any:
        return self.counts  # not a copy: later updates change it

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> dict[str, Any]:
        total = sum(per_slot_metrics)
        return {"by_two_and_three": total, "by_three": total.sum(axis=0)}


def sides(values: list[float]) -> dict[str, Any]:
    """A function with several metrics, one of them a list of lists."""
    return {
        "smallest": min(values),
        "span": [[min(values), max(values)], [sum(values), len(values)]],
    }


def backwards(values: list[float]) -> list[float]:
    """A function with one metric, a list."""
    return sorted(values, reverse=True)


class TrainingMetrics(ToyTrial):
    """Odd ranks update with every index, even ranks with the first of each micro-batch."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        wrap = context.wrap_reducer
        self.mean = wrap(Mean(), name="mean", for_validation=False)
        self.sides = wrap(sides, for_validation=False)
        self.order = wrap(list, name="order", for_validation=False)
        self.remainders = wrap(Remainders())
        self.backwards = wrap(backwards, name="backwards", for_training=False)
        self.per_micro_batch = 1 + context.distributed.get_rank() % 2

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        micro_batch = next(dataloader_iter)
        values = micro_batch[1].flatten().tolist()[: self.per_micro_batch]
        self.mean.update(values)
        self.remainders.update(values)
        for value in values:
            self.sides.update(value)
        self.order.update(values[0])
        self.backwards.update(STRAY)
        return super().train_batch(iter([micro_batch]), epoch_idx, batch_idx)

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        micro_batch = next(dataloader_iter)
        values = micro_batch[1].flatten().tolist()
        self.remainders.update(values)
        for value in values:
            self.backwards.update(value)
        self.mean.update([STRAY])
        self.sides.update(STRAY)
        self.order.update(STRAY)
        return super().evaluate_batch(iter([micro_batch]), batch_idx)


class ReportedByHalf(TensorParallelTrial):
    """Every rank updates with its number, although odd ranks report no metrics."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        self.ranks = context.wrap_reducer(sorted, name="ranks")

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.ranks.update(self.context.distributed.get_rank())
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)
