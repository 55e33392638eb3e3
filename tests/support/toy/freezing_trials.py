"""Trials that freeze, thaw or set a layer while they train. The first layer stays as it is built.

Hyperparameter: `change`: "freezes", "thaws", "sets" (a frozen layer), or "all" of a
`PyTorchTrial`, with a layer for each.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from compiled_trials import Compiled
from engine_trials import SeveralEngines, error
from parallel_trials import ds_config
from torch import nn

from trial_core.pytorch import PyTorchTrialContext

AT = 2
"""The first batch with the layer in its second state."""


def changes(change: str) -> list[str]:
    """What happens to the layers from the third on."""
    return ["freezes", "thaws", "sets"] if change == "all" else [change]


def net(change: str) -> Any:
    torch.manual_seed(5)
    layers = [nn.Linear(6, 6) for _ in changes(change)]
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), *layers, nn.Linear(6, 2))
    model[0].requires_grad_(False)
    for layer, what in zip(layers, changes(change), strict=True):
        layer.requires_grad_(what == "freezes")
    return model


def altered(model: Any, change: str, batch: int) -> None:
    for index, what in enumerate(changes(change), start=2):
        if what == "sets" and batch >= AT:
            with torch.no_grad():
                model[index].bias.add_(1)
        elif what != "sets":
            model[index].requires_grad_((what == "freezes") == (batch < AT))


class Freezing(Compiled):
    """With averages of the weights, and an optimizer of all of them."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context, self.change = context, context.get_hparam("change")
        self.model = context.wrap_model(net(self.change), find_unused_parameters=True)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.optimizer = context.wrap_optimizer(optimizer)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        altered(self.model, self.change, batch_idx)
        return super().train_batch(batch, epoch_idx, batch_idx)


class FreezingEngine(SeveralEngines):
    """The same model in an engine. Hyperparameter: `zero_stage`."""

    def models(self) -> tuple[nn.Module, ...]:  # type: ignore[override]
        return (net(self.hparams["change"]),)

    def _wrapped(self, models: tuple[nn.Module, ...]) -> list[Any]:
        trained = [each for each in models[0].parameters() if each.requires_grad]
        engine, *_ = deepspeed.initialize(
            model=models[0], model_parameters=trained, config=ds_config(self.hparams)
        )
        return [self.context.wrap_model_engine(engine), None]

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        layer = self.first.module[2]
        with deepspeed.zero.GatheredParameters([layer.bias], modifier_rank=0):
            altered(self.first.module, self.hparams["change"], batch_idx)
        loss = self._loss(dataloader_iter)
        self.first.backward(loss)
        self.first.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": self._loss(dataloader_iter)}

    def _loss(self, dataloader_iter: Any) -> torch.Tensor:
        inputs, index = self._next(dataloader_iter)
        return error(self.first(inputs), index)
