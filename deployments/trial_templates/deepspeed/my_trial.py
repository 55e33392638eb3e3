"""Learns the length of vectors. Replace the model, the loss and the samples with yours."""

from typing import Any

import deepspeed
import torch
from torch.utils.data import TensorDataset

from trial_core.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext, overwrite_deepspeed_config
from trial_core.pytorch import DataLoader


class MyTrial(DeepSpeedTrial):
    """Each rank has one instance: the model, how it learns from a batch, and its data."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        width = context.get_hparam("width")  # from experiment.yaml
        model = torch.nn.Sequential(
            torch.nn.Linear(8, width), torch.nn.GELU(), torch.nn.Linear(width, 1)
        )
        config = overwrite_deepspeed_config(
            "ds_config.json", {"optimizer": {"params": {"lr": context.get_hparam("lr")}}}
        )
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        self.engine = context.wrap_model_engine(engine)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss = self._loss(dataloader_iter)
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": self._loss(dataloader_iter)}  # the mean: each batch counts the same

    def _loss(self, dataloader_iter: Any) -> torch.Tensor:
        vectors, lengths = self.context.to_device(next(dataloader_iter))
        return torch.nn.functional.mse_loss(self.engine(vectors), lengths)

    def build_training_data_loader(self) -> DataLoader:
        batch_size = self.engine.train_micro_batch_size_per_gpu()  # train_batch_size / ranks
        return DataLoader(samples(8000, seed=1), batch_size=batch_size, shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(samples(1000, seed=2), batch_size=100)


def samples(count: int, seed: int) -> TensorDataset:
    """Random vectors of eight numbers, each with its length. The ranks share them out."""
    vectors = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(vectors, vectors.norm(dim=1, keepdim=True))
