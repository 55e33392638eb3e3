"""Classifies scikit-learn's handwritten digits, as a DeepSpeedTrial."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed as ds
import torch
from digits_data import digits
from network import network
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ExponentialLR

from trial_core import deepspeed, pytorch


class DigitsTrial(deepspeed.DeepSpeedTrial):
    """A small convolutional network on images of 8 × 8 pixels."""

    def __init__(self, context: deepspeed.DeepSpeedTrialContext) -> None:
        self.context = context
        config = deepspeed.overwrite_deepspeed_config(
            str(Path(__file__).with_name("ds_config.json")),
            {"train_batch_size": context.get_hparam("global_batch_size")},
        )
        model, training = network(), digits(train=True)
        optimizer = torch.optim.Adam(model.parameters(), lr=context.get_hparam("lr"))
        # DeepSpeed steps a scheduler after every batch; over an epoch the rate shrinks to 0.8.
        batches_per_epoch = len(training) / config["train_batch_size"]
        engine, *_ = ds.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=ExponentialLR(optimizer, 0.8 ** (1 / batches_per_epoch)),
            config=config,
        )
        self.engine = context.wrap_model_engine(engine)
        self.training = training

    def train_batch(
        self, dataloader_iter: Iterator[Any], epoch_idx: int, batch_idx: int
    ) -> dict[str, torch.Tensor]:
        images, labels = self.context.to_device(next(dataloader_iter))
        loss = cross_entropy(self.engine(images), labels)
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter: Iterator[Any]) -> dict[str, torch.Tensor]:
        images, labels = self.context.to_device(next(dataloader_iter))
        scores = self.engine(images)
        return {
            "validation_loss": cross_entropy(scores, labels),
            "accuracy": (scores.argmax(1) == labels).float().mean(),
        }

    def build_training_data_loader(self) -> pytorch.DataLoader:
        size = self.engine.train_micro_batch_size_per_gpu()
        return pytorch.DataLoader(self.training, batch_size=size, shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        size = self.engine.train_micro_batch_size_per_gpu()
        return pytorch.DataLoader(digits(train=False), batch_size=size)
