"""Trials with one mistake each."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from toy_trial import ToyTrial, samples

from trial_core.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext
from trial_core.pytorch import DataLoader


class NotATrial:
    """Has the right methods, perhaps, but not the right base."""


class Unfinished(DeepSpeedTrial):
    """Leaves out what every trial must define."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context


class NoEngine(ToyTrial):
    """Builds nothing to train."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.record = None


class RefusedBatchSize(ToyTrial):
    """Batch sizes that do not multiply."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        model = torch.nn.Linear(2, 1)
        deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config={
                "train_batch_size": 7,
                "train_micro_batch_size_per_gpu": 2,
                "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
            },
        )


class ForgetsToStep(ToyTrial):
    """Never runs an optimizer step."""

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        inputs, index = next(dataloader_iter)
        return {"loss": self._loss(inputs, index)}


class EmptyTraining(ToyTrial):
    """Trains on nothing."""

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(samples(3), batch_size=4, drop_last=True)


class PlainLoader(ToyTrial):
    """Returns a loader that does not shard."""

    def build_training_data_loader(self) -> Any:
        return torch.utils.data.DataLoader(samples(8))


class RaisesInEvaluation(ToyTrial):
    """A mistake of the user's own."""

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        raise KeyError("accuracy")
