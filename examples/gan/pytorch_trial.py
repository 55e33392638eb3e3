"""Trains a generator and a discriminator, each with its optimizer, as one PyTorchTrial."""

from __future__ import annotations

from typing import Any

import torch
from data import load
from networks import adversarial_loss, discriminator, generator, measures
from torch import Tensor, nn

from trial_core.pytorch import DataLoader, PyTorchTrial, PyTorchTrialContext


class GANTrial(PyTorchTrial):
    """Two models and two optimizers. Each batch is one step of both."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        self.hparams = context.get_hparams()
        self.training, self.validation = load()
        width, noise = self.hparams["width"], self.hparams["noise"]
        self.generator = context.wrap_model(generator(noise, width))
        self.discriminator = context.wrap_model(discriminator(width))
        self.g_optimizer = self._optimizer(self.generator, "generator")
        self.d_optimizer = self._optimizer(self.discriminator, "discriminator")

    def _optimizer(self, model: nn.Module, name: str) -> torch.optim.Optimizer:
        rate = self.hparams["lr"][name]
        adam = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.5, 0.999))
        return self.context.wrap_optimizer(adam)

    def build_training_data_loader(self) -> DataLoader:
        size = self.context.get_per_slot_batch_size()
        return DataLoader(self.training, batch_size=size, shuffle=True, drop_last=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(self.validation, batch_size=self.hparams["validation_batch_size"])

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Tensor]:
        (real,) = batch
        fake = self.generator(self._noise(len(real)))

        seen = torch.cat([real, fake.detach()])
        d_loss = adversarial_loss(self.discriminator(seen), real=len(real), fake=len(real))
        self.context.backward(d_loss)
        self.context.step_optimizer(self.d_optimizer)

        # This loss passes through the discriminator, and must leave no gradient there.
        self.discriminator.requires_grad_(False)
        g_loss = adversarial_loss(self.discriminator(fake), real=len(fake), fake=0)
        self.context.backward(g_loss)
        self.context.step_optimizer(self.g_optimizer)
        self.discriminator.requires_grad_(True)
        return {"g_loss": g_loss, "d_loss": d_loss}

    def evaluate_batch(self, batch: Any) -> dict[str, Tensor]:
        (real,) = batch
        fake = self.generator(self._noise(len(real)))
        return measures(fake, real, self.discriminator(fake))

    def _noise(self, count: int) -> Tensor:
        noise: Tensor = self.context.to_device(torch.randn(count, self.hparams["noise"]))
        return noise
