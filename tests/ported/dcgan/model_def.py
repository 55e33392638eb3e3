"""The shape of Determined's `dcgan_pytorch`: two models and two optimizers, two backward passes of
one model in a batch, pictures for TensorBoard, and `evaluate_full_dataset`."""

from typing import Any

import torch
from determined.pytorch import DataLoader, PyTorchTrial, PyTorchTrialContext, TorchData
from torch import nn

REAL_LABEL, FAKE_LABEL = 1.0, 0.0


def weights_init(m: nn.Module) -> None:
    if isinstance(m, nn.BatchNorm2d):
        nn.init.normal_(m.weight.data, 1.0, 0.02)
        nn.init.constant_(m.bias.data, 0)


class DCGANTrial(PyTorchTrial):
    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        self.logger = self.context.get_tensorboard_writer()
        self.noise_dim = self.context.get_hparam("noise_dim")
        self.fixed_noise = self.context.to_device(torch.randn(4, self.noise_dim, 1, 1))

        net_g = nn.Sequential(
            nn.ConvTranspose2d(self.noise_dim, 8, 4, 1, 0, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(True),
            nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )
        net_d = nn.Sequential(
            nn.Conv2d(1, 8, 4, 2, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 1, 4, 1, 0, bias=False),
            nn.Flatten(0),
        )
        net_g.apply(weights_init)
        net_d.apply(weights_init)
        self.generator = self.context.wrap_model(net_g)
        self.discriminator = self.context.wrap_model(net_d)
        lr, betas = self.context.get_hparam("lr"), (self.context.get_hparam("beta1"), 0.999)
        self.opt_d = self.context.wrap_optimizer(
            torch.optim.Adam(self.discriminator.parameters(), lr=lr, betas=betas)
        )
        self.opt_g = self.context.wrap_optimizer(
            torch.optim.Adam(self.generator.parameters(), lr=lr, betas=betas)
        )
        self.criterion = nn.BCEWithLogitsLoss()

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(
            self._pictures(96),
            batch_size=self.context.get_per_slot_batch_size(),
            shuffle=True,
            drop_last=True,
        )

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(self._pictures(24), batch_size=self.context.get_per_slot_batch_size())

    def set_requires_grad(self, requires_grad: bool) -> None:
        for parameter in self.discriminator.parameters():
            parameter.requires_grad = requires_grad

    def train_batch(
        self, batch: TorchData, epoch_idx: int, batch_idx: int
    ) -> dict[str, torch.Tensor]:
        real, _ = batch
        noise = self.context.to_device(torch.randn(real.size(0), self.noise_dim, 1, 1))

        # The discriminator: a backward pass for real pictures, and one for fake pictures.
        self.set_requires_grad(True)
        loss_real = self._loss(real, REAL_LABEL)
        self.context.backward(loss_real)
        fake = self.generator(noise)
        loss_fake = self._loss(fake.detach(), FAKE_LABEL)
        self.context.backward(loss_fake)
        self.context.step_optimizer(self.opt_d)

        # The generator.
        self.set_requires_grad(False)
        loss_g = self._loss(fake, REAL_LABEL)
        self.context.backward(loss_g)
        self.context.step_optimizer(self.opt_g)

        if batch_idx % 4 == 0 and self.context.distributed.get_rank() == 0:
            with torch.no_grad():
                self.logger.add_image("generated", self.generator(self.fixed_noise)[0], batch_idx)
        return {"loss_g": loss_g, "loss_d": loss_real + loss_fake}

    def evaluate_full_dataset(self, data_loader: torch.utils.data.DataLoader) -> dict[str, Any]:
        losses = [self._loss(self.context.to_device(batch)[0], REAL_LABEL) for batch in data_loader]
        return {"loss": torch.stack(losses).mean().item()}

    def _loss(self, pictures: torch.Tensor, label: float) -> torch.Tensor:
        output = self.discriminator(pictures)
        return self.criterion(output, torch.full_like(output, label))

    def _pictures(self, count: int) -> torch.utils.data.Dataset:
        pictures = torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(count))
        return torch.utils.data.TensorDataset(pictures * 2 - 1, torch.zeros(count))
