"""Trials that note, in each batch, the settings with which they train and what these do.

Each rank writes a line for each call of `train_batch` to ``seen-RANK.jsonl`` in folder `record`.
Hyperparameters: see `DEFAULTS`, and `by_hand`, settings that the trial gives its optimizer itself
before batch 4.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR
from toy_trial import samples

from trial_core.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext
from trial_core.pytorch import (
    DataLoader,
    LRScheduler,
    PyTorchCallback,
    PyTorchTrial,
    PyTorchTrialContext,
)

OPTIMIZER = ("lr", "weight_decay", "betas", "eps")
DEFAULTS = {
    "lr": 0.01, "weight_decay": 0.1, "betas": [0.9, 0.99], "eps": 1e-8, "clip": 0.5, "ema": 0.5,
    "optimizer": "AdamW", "groups": 1, "schedule": "", "length": 6, "shuffle": True,
    "global_batch_size": 16, "micro_batch": 4, "growth_interval": 100,
    "zero_stage": 1, "own": True, "bf16": False, "samples": 128,
}  # fmt: skip


def net() -> nn.Sequential:
    """A small model with dropout, so that random state matters."""
    return nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.2), nn.Tanh(), nn.Linear(4, 2))


class Average(PyTorchCallback):
    """A moving average of a weight, in each checkpoint."""

    def __init__(self, decay: float) -> None:
        self.decay, self.value = decay, 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


class _Noting:
    """What both kinds of trial share."""

    context: Any
    optimizer: Optimizer
    is_divided = False

    def begin(self, context: Any) -> None:
        self.context, self.hparams = context, {**DEFAULTS, **context.get_hparams()}
        self.average, self.squares = Average(self.hparams["ema"]), 0.0

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        parameters, count = [*model.parameters()], self.hparams["groups"]
        return [{"params": parameters[i::count]} for i in range(count)]

    def torch_optimizer(self, model: nn.Module) -> Optimizer:
        if self.hparams["optimizer"] == "SGD":
            return torch.optim.SGD(self.groups(model), lr=self.hparams["lr"])
        return torch.optim.AdamW(self.groups(model), **self.of_optimizer())

    def of_optimizer(self) -> dict[str, Any]:
        return {name: self.hparams[name] for name in OPTIMIZER}

    def torch_schedule(self, optimizer: Optimizer) -> Any:
        if self.hparams["schedule"] == "other":
            return ExponentialLR(optimizer, 0.9)
        return CosineAnnealingLR(optimizer, self.hparams["length"])

    def measure(self, optimizer: Optimizer, *_: Any) -> None:
        """Before each step of an optimizer: the length of its gradient, as it is then."""
        gradients = [each.grad for group in optimizer.param_groups for each in group["params"]]
        for each in gradients:
            if each is not None:
                local = each.to_local() if hasattr(each, "to_local") else each
                self.squares += float(local.double().square().sum())

    def before_step(self, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.squares, group = 0.0, self.optimizer.param_groups[0]
        if batch_idx == 4:
            for each in self.optimizer.param_groups:
                each.update(self.hparams.get("by_hand", {}))
        place = {"epoch": epoch_idx, "batch": batch_idx}
        return {**place, **{name: group.get(name) for name in OPTIMIZER}}

    def after_step(self, noted: dict[str, Any], index: torch.Tensor, weights: Any) -> None:
        squares = torch.tensor(self.squares, dtype=torch.float64)
        if self.is_divided:
            dist.all_reduce(squares)
        parts = [each.detach().double().flatten() for each in weights]
        before, decay = self.average.value, self.average.decay
        self.average.value = decay * before + (1 - decay) * float(parts[0][0])
        line = {
            **noted,
            "samples": index.flatten().tolist(),
            "clipped": float(squares.sqrt()),
            "weights": hashlib.sha256(torch.cat(parts).numpy().tobytes()).hexdigest(),
            "average": [before, float(parts[0][0]), self.average.value],
        }
        path = Path(self.hparams["record"]) / f"seen-{self.context.distributed.get_rank()}.jsonl"
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def loss(self, output: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Its gradients are so long that they are clipped."""
        return 100 * nn.functional.mse_loss(output.float().sum(1, keepdim=True), 1 + index / 64)

    def loader(self, batch_size: int) -> DataLoader:
        return DataLoader(
            samples(self.hparams["samples"]), batch_size=batch_size, shuffle=self.hparams["shuffle"]
        )

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(samples(4), batch_size=2)

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"average": self.average}


class Torch(_Noting, PyTorchTrial):
    """A PyTorchTrial with a scaler of its own."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.begin(context)
        self.model = context.wrap_model(net())
        self.optimizer = context.wrap_optimizer(self.torch_optimizer(self.model))
        self.optimizer.register_step_pre_hook(self.measure)
        self.is_divided = hasattr(next(self.model.parameters()), "to_local")
        if self.hparams["schedule"]:
            schedule = self.torch_schedule(self.optimizer)
            context.wrap_lr_scheduler(schedule, LRScheduler.StepMode.STEP_EVERY_BATCH)
        interval = self.hparams["growth_interval"]
        self.scaler = GradScaler("cpu", init_scale=4.0, growth_interval=interval)
        context.wrap_scaler(self.scaler)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        inputs, index = batch
        loss = self.loss(self.model(inputs), index)
        noted = self.before_step(epoch_idx, batch_idx)
        noted |= {"scale": self.scaler.get_scale(), "grows": self.scaler.get_growth_interval()}
        self.context.backward(self.scaler.scale(loss))
        self.context.step_optimizer(self.optimizer, self._clip, scaler=self.scaler)
        if self.context.steps_in_this_batch:
            # What training has made of the scale, when the checkpoint is saved.
            self.scaler.update(8.0 if batch_idx == 3 else None)
        weights = [
            each.full_tensor() if hasattr(each, "full_tensor") else each
            for each in self.model.parameters()
        ]
        self.after_step(noted, index, weights)
        return {"loss": loss}

    def _clip(self, parameters: list[nn.Parameter]) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(parameters, self.hparams["clip"])

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": self.loss(self.model(batch[0]), batch[1])}

    def build_training_data_loader(self) -> DataLoader:
        return self.loader(self.context.get_per_slot_batch_size())


class Deep(_Noting, DeepSpeedTrial):
    """A DeepSpeedTrial; with `own`, its optimizer and schedule are DeepSpeed's."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.begin(context)
        model, own = net(), self.hparams["own"]
        optimizer = None if own else self.torch_optimizer(model)
        has_schedule = bool(self.hparams["schedule"])
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=self.groups(model),
            optimizer=optimizer,
            lr_scheduler=self.torch_schedule(optimizer) if has_schedule and optimizer else None,
            config=self._config(),
        )
        self.engine = context.wrap_model_engine(engine)
        self.optimizer = engine.basic_optimizer
        self.optimizer.register_step_pre_hook(self.measure)
        self.is_divided = self.hparams["zero_stage"] > 0

    def _config(self) -> dict[str, Any]:
        of = self.hparams
        config: dict[str, Any] = {
            "train_batch_size": of["global_batch_size"],
            "train_micro_batch_size_per_gpu": of["micro_batch"],
            "gradient_clipping": of["clip"],
            "zero_optimization": {"stage": of["zero_stage"], "reduce_bucket_size": 1000},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1000000,
        }
        if of["bf16"]:
            config["bf16"] = {"enabled": True}
        if of["own"]:
            is_adam = of["optimizer"] == "AdamW"
            params = {**self.of_optimizer(), "torch_adam": True} if is_adam else {"lr": of["lr"]}
            config["optimizer"] = {"type": of["optimizer"], "params": params}
        if of["own"] and of["schedule"]:
            warmup = {"warmup_max_lr": of["lr"], "warmup_num_steps": 2}
            decay = {**warmup, "total_num_steps": of["length"]}
            config["scheduler"] = {"type": "WarmupDecayLR", "params": decay}
            if of["schedule"] == "other":
                config["scheduler"] = {"type": "WarmupLR", "params": warmup}
        return config

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        inputs, index = self.context.to_device(next(dataloader_iter))
        parameters = [*self.engine.module.parameters()]
        loss = self.loss(self.engine(inputs.to(parameters[0].dtype)), index)
        self.engine.backward(loss)
        noted = self.before_step(epoch_idx, batch_idx)
        self.engine.step()
        with deepspeed.zero.GatheredParameters(parameters):
            weights = [each.detach().clone() for each in parameters]
        self.after_step(noted, index, weights)
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        inputs, index = self.context.to_device(next(dataloader_iter))
        dtype = next(self.engine.module.parameters()).dtype
        return {"loss": self.loss(self.engine(inputs.to(dtype)), index)}

    def build_training_data_loader(self) -> DataLoader:
        return self.loader(self.hparams["micro_batch"])
