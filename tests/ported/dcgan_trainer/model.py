"""The shape of Determined's DeepSpeed `dcgan`: two engines, of which each makes its own backward
passes and steps, with gradients that the trial accumulates itself."""

import logging
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from determined.pytorch import DataLoader, TorchData, deepspeed as det_ds
from torch import nn


class DCGANTrial(det_ds.DeepSpeedTrial):
    def __init__(
        self, context: det_ds.DeepSpeedTrialContext, hparams: dict, data_config: dict
    ) -> None:
        self.context = context
        self.pictures = data_config["pictures"]
        self.noise_length = hparams["noise_length"]
        self.logger = self.context.get_tensorboard_writer()
        gen_net = nn.Sequential(nn.Linear(self.noise_length, 16), nn.ReLU(), nn.Linear(16, 9))
        disc_net = nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())
        ds_config = det_ds.overwrite_deepspeed_config(
            hparams["deepspeed_config"], hparams.get("overwrite_deepspeed_args", {})
        )
        generator, _, _, _ = deepspeed.initialize(
            model=gen_net, model_parameters=gen_net.parameters(), config=ds_config
        )
        discriminator, _, _, _ = deepspeed.initialize(
            model=disc_net, model_parameters=disc_net.parameters(), config=ds_config
        )
        self.generator = self.context.wrap_model_engine(generator)
        self.discriminator = self.context.wrap_model_engine(discriminator)
        self.criterion = nn.BCELoss()
        self.gradient_accumulation_steps = generator.gradient_accumulation_steps()
        if self.gradient_accumulation_steps > 1:
            logging.info("Disabling automatic gradient accumulation.")
            self.context.disable_auto_grad_accumulation()

    def train_batch(
        self, iter_dataloader: Iterator[TorchData] | None, epoch_idx: int, batch_idx: int
    ) -> dict[str, Any]:
        assert iter_dataloader is not None
        size = self.context.train_micro_batch_size_per_gpu
        real_label, fake_label = torch.ones(size, 1), torch.zeros(size, 1)
        self.discriminator.zero_grad()
        loss_d, loss_g = 0.0, 0.0
        for _ in range(self.gradient_accumulation_steps):
            (real,) = self.context.to_device(next(iter_dataloader))
            loss_real = self.criterion(self.discriminator(real), real_label[: len(real)])
            self.discriminator.backward(loss_real)
            fake = self.generator(torch.randn(size, self.noise_length))
            loss_fake = self.criterion(self.discriminator(fake.detach()), fake_label)
            self.discriminator.backward(loss_fake)
            self.discriminator.step()
            loss_d += (loss_real + loss_fake).item()
        self.generator.zero_grad()
        for i in range(self.gradient_accumulation_steps):
            if i > 0:
                fake = self.generator(torch.randn(size, self.noise_length))
            loss = self.criterion(self.discriminator(fake), real_label)
            self.generator.backward(loss)
            self.generator.step()
            loss_g += loss.item() * self.context._train_micro_batch_size_per_gpu
        if batch_idx % 100 == 0:
            self.logger.add_scalar("real_mean", real.mean(), batch_idx)
        return {"errD": loss_d, "errG": loss_g}

    def evaluate_batch(
        self, dataloader_iter: Iterator[TorchData] | None, batch_idx: int
    ) -> dict[str, Any]:
        assert dataloader_iter is not None
        next(dataloader_iter)
        return {"no_validation_metric": 0.0}

    def build_training_data_loader(self) -> Any:
        pictures = torch.rand(self.pictures, 9, generator=torch.Generator().manual_seed(1))
        return DataLoader(
            torch.utils.data.TensorDataset(pictures),
            batch_size=self.context.train_micro_batch_size_per_gpu,
            shuffle=True,
        )

    def build_validation_data_loader(self) -> Any:
        size = self.context.train_micro_batch_size_per_gpu
        count = size * self.context.distributed.get_size()
        return DataLoader(torch.utils.data.TensorDataset(torch.rand(count, 9)), batch_size=size)
