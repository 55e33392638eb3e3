"""Fits a small PyTorchTrial, and prints its result as JSON: ``fit_pytorch.py LATEST BATCHES``."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import trial_core
from trial_core import pytorch
from trial_core.pytorch import Batch, DataLoader


class Noted(pytorch.PyTorchCallback):
    """Adds a metric after each validation."""

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        metrics["noted"] = 1


class Line(pytorch.PyTorchTrial):
    """A line through two points, on batches of four samples. Rank 0 alone has a callback."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        line = nn.Linear(1, 1)
        line.register_buffer("mean", torch.zeros(1))  # ranks exchange buffers
        self.model = context.wrap_model(line)
        self.optimizer = context.wrap_optimizer(
            torch.optim.SGD(self.model.parameters(), lr=context.get_hparam("lr"), momentum=0.9)
        )

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss = (self.model(batch[0]) - 2).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        weight, bias = self.model.weight.item(), self.model.bias.item()
        return {"weight": weight, "bias": bias}

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.arange(8.0).unsqueeze(1)), batch_size=2)

    def build_validation_data_loader(self) -> DataLoader:
        return self.build_training_data_loader()

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"noted": Noted()} if self.context.distributed.get_rank() == 0 else {}


def main() -> None:
    """Fit, and print the result on rank 0."""
    latest, batches = sys.argv[1:]
    assert trial_core.get_cluster_info() is None
    with pytorch.init(hparams={"lr": 0.01}, aggregation_frequency=2) as context:
        trainer = pytorch.Trainer(Line(context), context)
        trainer.configure_profiler(sync_timings=True, enabled=True, begin_on_batch=3)
        result = trainer.fit(
            max_length=Batch(int(batches)),
            checkpoint_policy="none",
            latest_checkpoint=latest or None,
        )
        if context.distributed.get_rank() == 0:
            sample = {"uuid": result.checkpoint_uuid, "url": result.checkpoint_url}
            print(json.dumps({**sample, "metrics": result.validation_metrics}))


if __name__ == "__main__":
    main()
