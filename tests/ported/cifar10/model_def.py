"""The shape of Determined's `cifar10_pytorch`: data of the `data` section, an error beside the
loss, callbacks, and a reducer for each metric."""

from typing import Any

import torch
from determined import pytorch
from torch import nn

CLASSES = 10


def error_rate(predictions: torch.Tensor, labels: torch.Tensor) -> float:
    return 1.0 - float((predictions.argmax(1) == labels.to(torch.long)).sum()) / labels.shape[0]


class EpochCounter(pytorch.PyTorchCallback):
    def __init__(self) -> None:
        self.epochs = 0

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        self.epochs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epochs = state_dict["epochs"]


class CIFARTrial(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.url = self.context.get_data_config()["url"]
        self.model = self.context.wrap_model(
            nn.Sequential(
                nn.Conv2d(3, 8, kernel_size=3),
                nn.BatchNorm2d(8),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Dropout2d(self.context.get_hparam("layer1_dropout")),
                nn.Flatten(),
                nn.Linear(8 * 5 * 5, CLASSES),
            )
        )
        self.optimizer = self.context.wrap_optimizer(
            torch.optim.RMSprop(
                self.model.parameters(),
                lr=self.context.get_hparam("learning_rate"),
                weight_decay=self.context.get_hparam("learning_rate_decay"),
                alpha=0.9,
            )
        )
        self.lr_scheduler = self.context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda epoch: 0.95**epoch),
            step_mode=pytorch.LRScheduler.StepMode.STEP_EVERY_EPOCH,
        )

    def train_batch(
        self, batch: pytorch.TorchData, epoch_idx: int, batch_idx: int
    ) -> dict[str, torch.Tensor]:
        data, labels = batch
        output = self.model(data)
        loss = nn.functional.cross_entropy(output, labels)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss, "train_error": error_rate(output, labels), "lr": self._rate()}

    def evaluate_batch(self, batch: pytorch.TorchData, batch_idx: int) -> dict[str, Any]:
        data, labels = batch
        output = self.model(data)
        correct = (output.argmax(1) == labels).sum()
        return {"validation_error": error_rate(output, labels), "correct": correct}

    def evaluation_reducer(self) -> dict[str, pytorch.Reducer]:
        return {"validation_error": pytorch.Reducer.AVG, "correct": pytorch.Reducer.SUM}

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"epochs": EpochCounter()}

    def build_training_data_loader(self) -> pytorch.DataLoader:
        size = self.context.get_per_slot_batch_size()
        return pytorch.DataLoader(self._pictures(64), batch_size=size, shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        size = self.context.get_per_slot_batch_size()
        return pytorch.DataLoader(self._pictures(40), batch_size=size)

    def _pictures(self, count: int) -> torch.utils.data.Dataset:
        generator = torch.Generator().manual_seed(len(self.url))
        labels = torch.randint(0, CLASSES, (count,), generator=generator)
        pictures = torch.randn(count, 3, 12, 12, generator=generator) + labels[:, None, None, None]
        return torch.utils.data.TensorDataset(pictures, labels)

    def _rate(self) -> float:
        return self.optimizer.param_groups[0]["lr"]
