"""Learns the length of vectors. Replace the model, the loss and the samples with yours."""

from typing import Any

import torch
from torch.utils.data import TensorDataset

from trial_core.pytorch import DataLoader, PyTorchTrial, PyTorchTrialContext


class MyTrial(PyTorchTrial):
    """Each rank has one instance: the model, how it learns from a batch, and its data."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        width = context.get_hparam("width")  # from experiment.yaml
        model = torch.nn.Sequential(
            torch.nn.Linear(8, width), torch.nn.GELU(), torch.nn.Linear(width, 1)
        )
        self.model = context.wrap_model(model)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=context.get_hparam("lr"))
        self.optimizer = context.wrap_optimizer(optimizer)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss = self._loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)  # with the mean gradients of all ranks
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": self._loss(batch)}  # the mean: each batch counts the same

    def _loss(self, batch: Any) -> torch.Tensor:
        vectors, lengths = batch
        return torch.nn.functional.mse_loss(self.model(vectors), lengths)

    def build_training_data_loader(self) -> DataLoader:
        batch_size = self.context.get_per_slot_batch_size()  # global_batch_size / ranks
        return DataLoader(samples(8000, seed=1), batch_size=batch_size, shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(samples(1000, seed=2), batch_size=100)


def samples(count: int, seed: int) -> TensorDataset:
    """Random vectors of eight numbers, each with its length. The ranks share them out."""
    vectors = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(vectors, vectors.norm(dim=1, keepdim=True))
