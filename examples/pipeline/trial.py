"""Trains a network in two pipeline stages: each rank holds only its own layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trial_core.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext
from trial_core.pytorch import DataLoader

PIXELS, DIGITS = 64, 10
VALIDATION_PERIOD = 5  # every fifth picture is for validation


class Residual(nn.Module):
    """A residual block: adds a change to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.change = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = values + self.change(values)
        return result


class PipelineTrial(DeepSpeedTrial):
    """A `PipelineModule`: each layer is built only on the rank that needs it."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.hparams = context.get_hparams()
        width = self.hparams["width"]
        blocks = [LayerSpec(Residual, width) for _ in range(self.hparams["blocks"])]
        model = PipelineModule(
            layers=[
                LayerSpec(nn.Linear, PIXELS, width),
                *blocks,
                LayerSpec(nn.LayerNorm, width),
                LayerSpec(nn.Linear, width, DIGITS),
            ],
            num_stages=self.hparams["stages"],
            loss_fn=nn.CrossEntropyLoss(),
            partition_method="parameters",  # about the same number of weights in each stage
        )
        engine, _, _, _ = deepspeed.initialize(
            model=model,
            model_parameters=[weight for weight in model.parameters() if weight.requires_grad],
            config=str(Path(__file__).with_name("ds_config.json")),
        )
        self.engine = context.wrap_model_engine(engine)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        # Takes gradient_accumulation_steps micro-batches through all stages.
        return {"loss": self.engine.train_batch(dataloader_iter)}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        loss = self.engine.eval_batch(dataloader_iter)
        return {"loss": loss, "perplexity": torch.exp(loss)}

    def build_training_data_loader(self) -> DataLoader | None:
        return self._loader(for_validation=False)

    def build_validation_data_loader(self) -> DataLoader | None:
        return self._loader(for_validation=True)

    def _loader(self, for_validation: bool) -> DataLoader | None:
        """None on middle stages: the first stage reads pictures, the last reads labels."""
        if not self.context.mpu.should_build_data_loader:
            return None
        digits = load_digits()
        pictures = torch.tensor(digits.data, dtype=torch.float32) / 8 - 1
        labels = torch.tensor(digits.target)
        chosen = (torch.arange(len(labels)) % VALIDATION_PERIOD == 0) == for_validation
        return DataLoader(
            TensorDataset(pictures[chosen], labels[chosen]),
            batch_size=self.engine.train_micro_batch_size_per_gpu(),
            shuffle=not for_validation,
            drop_last=not for_validation,
        )
