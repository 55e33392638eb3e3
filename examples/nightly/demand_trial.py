"""Predicts the demand for electricity from the hour and the temperature, as a DeepSpeedTrial."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import deepspeed as ds
import numpy as np
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset, TensorDataset

from trial_core import deepspeed, pytorch

VALIDATION_HOURS = 24 * 7


class DemandTrial(deepspeed.DeepSpeedTrial):
    """A small network on two numbers an hour. The last week is held out."""

    def __init__(self, context: deepspeed.DeepSpeedTrialContext) -> None:
        self.context = context
        self.file = context.get_data_config()["file"]
        model = nn.Sequential(
            nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        )
        config = {
            "train_batch_size": context.get_hparam("batch_size"),
            "zero_optimization": {"stage": 1},
            "steps_per_print": 1000000,
        }
        optimizer = torch.optim.Adam(model.parameters(), lr=context.get_hparam("lr"))
        engine, *_ = ds.initialize(model=model, optimizer=optimizer, config=config)
        self.engine = context.wrap_model_engine(engine)

    def train_batch(
        self, dataloader_iter: Iterator[Any], epoch_idx: int, batch_idx: int
    ) -> dict[str, torch.Tensor]:
        loss = self.loss(dataloader_iter)
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter: Iterator[Any]) -> dict[str, torch.Tensor]:
        return {"loss": self.loss(dataloader_iter)}

    def loss(self, batches: Iterator[Any]) -> torch.Tensor:
        """The mean squared error of the next batch."""
        features, demand = self.context.to_device(next(batches))
        return mse_loss(self.engine(features)[:, 0], demand)

    def hours(self, train: bool) -> Dataset[Any]:
        """The hours of the file to train on, or those to validate on."""
        stored = np.load(self.file)
        chosen = slice(None, -VALIDATION_HOURS) if train else slice(-VALIDATION_HOURS, None)
        return TensorDataset(
            *(torch.from_numpy(stored[name][chosen]) for name in ("features", "demand"))
        )

    def build_training_data_loader(self) -> pytorch.DataLoader:
        size = self.engine.train_micro_batch_size_per_gpu()
        return pytorch.DataLoader(self.hours(train=True), batch_size=size, shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        size = self.engine.train_micro_batch_size_per_gpu()
        return pytorch.DataLoader(self.hours(train=False), batch_size=size)
