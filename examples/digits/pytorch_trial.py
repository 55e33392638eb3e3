"""Classifies scikit-learn's handwritten digits, as a PyTorchTrial."""

from __future__ import annotations

from typing import Any

import torch
from digits_data import digits
from network import network
from torch.nn.functional import cross_entropy

from trial_core import pytorch


class DigitsTrial(pytorch.PyTorchTrial):
    """A small convolutional network on images of 8 × 8 pixels."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(network())
        self.optimizer = context.wrap_optimizer(
            torch.optim.Adam(self.model.parameters(), lr=context.get_hparam("lr"))
        )
        context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8),
            step_mode=pytorch.LRScheduler.StepMode.STEP_EVERY_EPOCH,
        )

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        images, labels = batch
        loss = cross_entropy(self.model(images), labels)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, torch.Tensor]:
        images, labels = batch
        scores = self.model(images)
        return {
            "validation_loss": cross_entropy(scores, labels),
            "accuracy": (scores.argmax(1) == labels).float().mean(),
        }

    def build_training_data_loader(self) -> pytorch.DataLoader:
        size = self.context.get_per_slot_batch_size()
        return pytorch.DataLoader(digits(train=True), batch_size=size, shuffle=True, drop_last=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        size = self.context.get_per_slot_batch_size()
        return pytorch.DataLoader(digits(train=False), batch_size=size)
