"""Trials that compile their model in one way or another, or not at all.

Hyperparameter: `compiled`, a key of `WAYS`. The backend "eager" computes as without torch.compile.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from engine_trials import SeveralEngines, error
from parallel_trials import ds_config
from torch import nn
from toy_trial import samples

from trial_core.callbacks import ExponentialMovingAverage
from trial_core.deepspeed import DeepSpeedTrialContext
from trial_core.pytorch import DataLoader, PyTorchCallback, PyTorchTrial, PyTorchTrialContext


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


class Block(nn.Module):
    """A part with parameters and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("shift", torch.full((6,), 0.1))
        self.layer, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        shifted = inputs * self.scale + self.shift.to(inputs.dtype)
        outputs: torch.Tensor = self.norm(torch.tanh(self.layer(shifted)))
        return outputs


class Net(nn.Module):
    """Blocks after a frozen layer, and a layer with two names. Two ranks divide it evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(2, 6).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 2)
        self.also = self.head

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        outputs: torch.Tensor = self.also(hidden)
        return outputs


def with_compiled_parts(model: Any) -> Any:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = compiled(block)
    model.also = model.head = compiled(model.head)
    return model


def compiled_in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def unchanged(model: Any) -> Any:
    return model


WAYS: dict[str, tuple[Any, Any]] = {
    "no": (unchanged, unchanged),
    "before": (compiled, unchanged),
    "after": (unchanged, compiled),
    "in place": (compiled_in_place, unchanged),
    "parts": (with_compiled_parts, unchanged),
    "parts after": (unchanged, with_compiled_parts),
    "all": (lambda model: compiled(with_compiled_parts(model)), unchanged),
}
"""What is done with a model before and after it is wrapped."""


class Compiled(PyTorchTrial):
    """Its optimizer knows the parameters' names, and a callback averages them."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        before, after = WAYS[context.get_hparam("compiled")]
        self.model = after(context.wrap_model(before(Net())))
        optimizer = torch.optim.AdamW(self.model.named_parameters(), lr=0.01)
        self.optimizer = context.wrap_optimizer(optimizer)

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"average": ExponentialMovingAverage(0.5)}

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss = self._loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        return {"loss": self._loss(batch)}

    def _loss(self, batch: Any) -> torch.Tensor:
        inputs, index = batch
        return error(self.model(inputs), index)

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(samples(64), batch_size=self.context.get_per_slot_batch_size())

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(samples(8), batch_size=2)


class CompiledOnce(Compiled):
    """Raises if torch is to compile its training a second time."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        limit: Any = torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True)
        with limit:
            return super().train_batch(batch, epoch_idx, batch_idx)


class CompiledEngine(SeveralEngines):
    """The same model in an engine. Hyperparameter: `ds_config`."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.ways = WAYS[context.get_hparam("compiled")]
        super().__init__(context)

    def models(self) -> tuple[nn.Module, ...]:  # type: ignore[override]
        return (self.ways[0](Net()),)

    def _wrapped(self, models: tuple[nn.Module, ...]) -> list[Any]:
        config = ds_config(self.hparams) | self.hparams["ds_config"]
        engine, *_ = deepspeed.initialize(
            model=models[0], model_parameters=models[0].parameters(), config=config
        )
        engine = self.context.wrap_model_engine(engine)
        return [engine, self.ways[1](engine) if self.ways[1] is compiled else engine]

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss = self._loss(dataloader_iter)
        self.first.backward(loss)
        self.first.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": self._loss(dataloader_iter)}

    def _loss(self, dataloader_iter: Any) -> torch.Tensor:
        inputs, index = self._next(dataloader_iter)
        dtype = next(self.first.parameters()).dtype
        return error(self.second(inputs.to(dtype)).float(), index)
