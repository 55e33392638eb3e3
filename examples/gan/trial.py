"""Trains a generator and a discriminator, two DeepSpeed engines, in one trial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
from data import load
from networks import adversarial_loss, discriminator, generator, measures
from torch import Tensor, nn

from trial_core.deepspeed import (
    DeepSpeedTrial,
    DeepSpeedTrialContext,
    overwrite_deepspeed_config,
)
from trial_core.pytorch import DataLoader


class GANTrial(DeepSpeedTrial):
    """Two engines, each with its own optimizer. Each batch is one step of both."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.hparams = context.get_hparams()
        self.training, self.validation = load()
        width, noise = self.hparams["width"], self.hparams["noise"]
        # The first wrapped engine determines the number of samples in a batch.
        self.generator = self._engine(generator(noise, width), "generator")
        self.discriminator = self._engine(discriminator(width), "discriminator")

    def _engine(self, model: nn.Module, name: str) -> Any:
        config = overwrite_deepspeed_config(
            str(Path(__file__).with_name("ds_config.json")),
            {"optimizer": {"params": {"lr": self.hparams["lr"][name]}}},
        )
        engine, _, _, _ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        return self.context.wrap_model_engine(engine)

    def build_training_data_loader(self) -> DataLoader:
        size = self.generator.train_micro_batch_size_per_gpu()
        return DataLoader(self.training, batch_size=size, shuffle=True, drop_last=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(self.validation, batch_size=self.hparams["validation_batch_size"])

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        (real,) = self.context.to_device(next(dataloader_iter))
        fake = self.generator(self._noise(len(real)))

        seen = torch.cat([real, fake.detach()])
        d_loss = adversarial_loss(self.discriminator(seen), real=len(real), fake=len(real))
        self.discriminator.backward(d_loss)
        self.discriminator.step()

        # This loss passes through the discriminator's module, and must leave no gradient there.
        self.discriminator.module.requires_grad_(False)
        g_loss = adversarial_loss(self.discriminator.module(fake), real=len(fake), fake=0)
        self.generator.backward(g_loss)
        self.generator.step()
        self.discriminator.module.requires_grad_(True)
        return {"g_loss": g_loss, "d_loss": d_loss}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        (real,) = self.context.to_device(next(dataloader_iter))
        fake = self.generator(self._noise(len(real)))
        return measures(fake, real, self.discriminator(fake))

    def _noise(self, count: int) -> Tensor:
        noise: Tensor = self.context.to_device(torch.randn(count, self.hparams["noise"]))
        return noise
