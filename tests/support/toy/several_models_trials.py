"""A PyTorchTrial with two models: one with tied and frozen weights and buffers, and a plain one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from toy_trial import samples

from trial_core import pytorch


class TiedPair(nn.Module):
    """Two layers with one weight, a frozen layer and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(2, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.norm = nn.BatchNorm1d(5)
        self.outputs = nn.Linear(5, 5)
        self.again = nn.Linear(5, 5)
        self.again.weight = self.outputs.weight
        self.register_buffer("scratch", torch.zeros(4), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.frozen(self.inputs(inputs)))
        result: torch.Tensor = self.again(torch.tanh(self.outputs(hidden)))
        return result


class SeveralModelsTrial(pytorch.PyTorchTrial):
    """Keeps the models' states after the last batch in the folder `record`.

    The hyperparameter `dtype` is the type of the second model's weights.
    """

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.dtype = getattr(torch, context.get_hparams().get("dtype", "float32"))
        self.first = context.wrap_model(TiedPair())
        self.second = context.wrap_model(nn.Linear(5, 1).to(self.dtype))
        models = (self.first, self.second)
        trained = [each for m in models for each in m.parameters() if each.requires_grad]
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(trained, lr=1e-2))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss = self._loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        self._record()
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        return {"loss": self._loss(batch)}

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(samples(64), batch_size=4, shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(samples(16), batch_size=4)

    def _loss(self, batch: Any) -> torch.Tensor:
        inputs, index = batch
        guess = self.second(self.first(inputs).to(self.dtype)).float()
        return nn.functional.mse_loss(guess, index / 64)

    def _record(self) -> None:
        if self.context.distributed.get_rank() == 0:
            states = [
                {name.removeprefix("module."): each for name, each in model.state_dict().items()}
                for model in (self.first, self.second)
            ]
            torch.save(states, Path(self.context.get_hparam("record")) / "truth.pt")


class ShardedPairTrial(SeveralModelsTrial):
    """Two plain models, which the ranks divide among them."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.dtype = torch.float32
        self.first = context.wrap_model(nn.Linear(2, 5), sharding="fsdp2")
        self.second = context.wrap_model(nn.Linear(5, 1), sharding="fsdp2")
        trained = [*self.first.parameters(), *self.second.parameters()]
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(trained, lr=1e-2))

    def _record(self) -> None:
        states = [
            {name: each.full_tensor() for name, each in model.state_dict().items()}
            for model in (self.first, self.second)
        ]
        if self.context.distributed.get_rank() == 0:
            torch.save(states, Path(self.context.get_hparam("record")) / "truth.pt")
