"""The shape of Determined's `mnist_pytorch`: one model, one optimizer, a folder for each rank."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from determined.pytorch import DataLoader, PyTorchTrial, PyTorchTrialContext
from torch import nn

TorchData = dict[str, torch.Tensor] | Sequence[torch.Tensor] | torch.Tensor


def get_dataset(download_dir: str, train: bool) -> torch.utils.data.Dataset:
    torch.manual_seed(0 if train else 1)
    labels = torch.randint(0, 10, (96 if train else 48,))
    images = torch.randn(len(labels), 1, 12, 12) + labels[:, None, None, None] / 3
    return torch.utils.data.TensorDataset(images, labels)


class MNistTrial(PyTorchTrial):
    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        self.download_directory = f"/tmp/data-rank{self.context.distributed.get_rank()}"
        self.model = self.context.wrap_model(
            nn.Sequential(
                nn.Conv2d(1, self.context.get_hparam("n_filters1"), 3, 1),
                nn.ReLU(),
                nn.Dropout2d(self.context.get_hparam("dropout1")),
                nn.Flatten(),
                nn.Linear(100 * self.context.get_hparam("n_filters1"), 10),
                nn.LogSoftmax(dim=1),
            )
        )
        self.optimizer = self.context.wrap_optimizer(
            torch.optim.Adadelta(
                self.model.parameters(), lr=self.context.get_hparam("learning_rate")
            )
        )

    def build_training_data_loader(self) -> DataLoader:
        train_data = get_dataset(self.download_directory, train=True)
        return DataLoader(train_data, batch_size=self.context.get_per_slot_batch_size())

    def build_validation_data_loader(self) -> DataLoader:
        validation_data = get_dataset(self.download_directory, train=False)
        return DataLoader(validation_data, batch_size=self.context.get_per_slot_batch_size())

    def train_batch(
        self, batch: TorchData, epoch_idx: int, batch_idx: int
    ) -> dict[str, torch.Tensor]:
        batch = cast(tuple[torch.Tensor, torch.Tensor], batch)
        data, labels = batch
        loss = nn.functional.nll_loss(self.model(data), labels)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: TorchData) -> dict[str, Any]:
        batch = cast(tuple[torch.Tensor, torch.Tensor], batch)
        data, labels = batch
        output = self.model(data)
        validation_loss = nn.functional.nll_loss(output, labels).item()
        pred = output.argmax(dim=1, keepdim=True)
        accuracy = pred.eq(labels.view_as(pred)).sum().item() / len(data)
        return {"validation_loss": validation_loss, "accuracy": accuracy}
