"""Trials that train an adapter beside a large frozen layer, as LoRA does."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from parallel_trials import ds_config
from pytorch_trials import FEATURES, Small
from torch import nn
from toy_trial import ToyTrial

from trial_core.deepspeed import DeepSpeedTrialContext

WIDTH = 1024


class Adapted(nn.Module):
    """A frozen layer of 4 MiB, and trained ones of 1/500 of that beside it."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(features, WIDTH).requires_grad_(False)
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        # Of even sizes: ZeRO-3 does not initialize what pads a parameter.
        self.down, self.up = nn.Linear(WIDTH, 2), nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.base(self.inputs(inputs)))
        result: torch.Tensor = self.up(self.down(hidden)).sum(1, keepdim=True)
        return result


class DeepSpeedAdapter(ToyTrial):
    """A DeepSpeedTrial of that model. Hyperparameter: zero_stage."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        context.models.clear()
        model = Adapted(2)
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=[each for each in model.parameters() if each.requires_grad],
            config=ds_config(self.hparams),
        )
        self.engine = context.wrap_model_engine(engine)


class PyTorchAdapter(Small):
    """A PyTorchTrial of that model."""

    def build(self) -> None:
        self.model = self.wrap(Adapted(FEATURES).double())
        self.optimizer = self.context.wrap_optimizer(
            torch.optim.Adam([each for each in self.model.parameters() if each.requires_grad])
        )

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        inputs, index = batch
        loss = self.loss(self.model(inputs), index)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}
