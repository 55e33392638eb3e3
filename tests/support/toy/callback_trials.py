"""PyTorchTrials with ready-made callbacks."""

from __future__ import annotations

from typing import Any

import torch
from pytorch_trials import Small
from toy_trial import ToyTrial

from trial_core.callbacks import (
    EarlyStopping,
    ExponentialMovingAverage,
    StopOnNonFinite,
    ThroughputAndMemory,
)
from trial_core.pytorch import PyTorchCallback


class ReadyMade(Small):
    """Records the weights that validations see. Hyperparameters: `nan_at`, `nan_rank`, `stops`."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        metrics = super().train_batch(batch, epoch_idx, batch_idx)
        if batch_idx >= self.hparams.get("nan_at", 10**6) and (
            self.context.distributed.get_rank() == 1
        ):
            return {"loss": torch.tensor(float("nan"))}
        return metrics

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        self.note("validated", float(next(self.first_model.parameters()).sum()))
        return super().evaluate_batch(batch)

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        callbacks: dict[str, PyTorchCallback] = {
            "average": ExponentialMovingAverage(0.5), "speed": ThroughputAndMemory()
        }  # fmt: skip
        if self.hparams.get("stops") == "early":
            callbacks["stop"] = EarlyStopping(patience=2, min_delta=100.0)
        if self.hparams.get("stops") == "nan":
            callbacks["stop"] = StopOnNonFinite()
        return callbacks


class ReadyMadeEngine(ToyTrial):
    """With averages of an engine's weights."""

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"average": ExponentialMovingAverage(0.5), "speed": ThroughputAndMemory()}
