"""Toy trials whose metrics are not only numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hook_trials import CallLog
from toy_trial import ToyTrial

from trial_core.deepspeed import DeepSpeedTrialContext
from trial_core.pytorch import PyTorchCallback


class LogsWorkloads(PyTorchCallback):
    """Logs what it gets at the end of a train-workload, and of a validation."""

    def __init__(self, log: CallLog) -> None:
        self.log = log

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: Any) -> None:
        self.log.add("workload", average=avg_metrics, batches=batch_metrics)

    def on_validation_epoch_end(self, outputs: list[dict[str, Any]]) -> None:
        self.log.add("outputs", shapes=[each["loss"].shape for each in outputs])

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self.log.add("validated", is_best=bool(metrics["loss"] > -1.0), shape=metrics["loss"].shape)


class EveryType(ToyTrial):
    """Returns a value of every type. The searcher's loss has the shape (1,).

    Only the last rank has a callback that gets the metrics.
    """

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        self.log = CallLog(context)
        self.calls = 0
        self.last_note = context.wrap_reducer(max, name="last_note", for_training=False)

    def _others(self, number: int) -> dict[str, Any]:
        rank = self.context.distributed.get_rank()
        return {
            "losses": [torch.tensor([0.5, 1.0]) + number, np.arange(2 + rank)],
            "large": torch.tensor(2**62),  # the sum of a few is more than int64 holds
            "note": f"rank {rank}, {number}",
            "even": float(number + 10 * rank) if number % 2 == 0 else None,
            "parts": {"a": torch.tensor(number), "b": {"c": None}},
        }

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        number, self.calls = self.calls, self.calls + 1
        metrics = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        return {**metrics, "call": torch.tensor(float(number)), **self._others(number)}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        metrics = super().evaluate_batch(dataloader_iter, batch_idx)
        self.last_note.update(f"batch {batch_idx}")
        return {"loss": metrics["loss"].reshape(1), **self._others(batch_idx)}

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"logs": LogsWorkloads(self.log)} if self.log.is_last_rank else {}


class EveryTypeOnAllRanks(EveryType):
    """Every rank has the callback."""

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"logs": LogsWorkloads(self.log)}
