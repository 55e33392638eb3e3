"""PyTorchTrials with all kinds of state, with hooks that change it, and in mixed precision."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from odd_optimizer import OddOptimizer
from pytorch_trials import FEATURES, Small
from torch import nn

from trial_core.pytorch import LRScheduler, PyTorchCallback, PyTorchTrial
from trial_core.pytorch.distributed_model import unwrapped


class Counts(PyTorchCallback):
    """Counts epochs, in its state."""

    def __init__(self) -> None:
        self.epochs = 0

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        self.epochs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epochs = state_dict["epochs"]


class Everything(Small):
    """Two models with dropout and running means, two optimizers, a scheduler of each step mode.

    In mixed precision, with a loss scale that doubles at every second step.
    """

    def build(self) -> None:
        context, modes = self.context, LRScheduler.StepMode
        context.configure_apex_amp([], [], cast_model_type=None)
        context.scaler.set_growth_interval(2)
        self.body = self.wrap(
            nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3))
        )
        self.head = self.wrap(nn.Linear(8, 1))
        adam = context.wrap_optimizer(torch.optim.Adam(self.body.parameters(), lr=0.01))
        sgd = context.wrap_optimizer(torch.optim.SGD(self.head.parameters(), lr=0.05, momentum=0.9))
        self.optimizers = [adam, sgd]
        steps = torch.optim.lr_scheduler
        context.wrap_lr_scheduler(steps.StepLR(adam, 1, 0.9), modes.STEP_EVERY_EPOCH)
        context.wrap_lr_scheduler(steps.MultiStepLR(sgd, [1, 3]), modes.STEP_EVERY_BATCH, 2)
        context.wrap_lr_scheduler(
            steps.LambdaLR(adam, lambda step: 0.95**step), modes.STEP_EVERY_OPTIMIZER_STEP
        )
        self.plateau = context.wrap_lr_scheduler(
            steps.ReduceLROnPlateau(sgd, patience=1, factor=0.7), modes.MANUAL_STEP
        )

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        inputs, index = (each.float() for each in batch)
        self.note("samples", [batch_idx, epoch_idx, *index.flatten().tolist()])
        loss = self.loss(self.head(self.body(inputs)), index) * np.random.uniform(0.9, 1.1)
        self.context.backward(loss)
        for optimizer in self.optimizers:
            self.context.step_optimizer(
                optimizer, clip_grads=lambda each: nn.utils.clip_grad_norm_(each, 0.5)
            )
        self.plateau.step(batch_idx)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        inputs, index = (each.float() for each in batch)
        self.note("buffers", unwrapped(self.body)[1].running_mean.tolist())
        return {"loss": self.loss(self.head(self.body(inputs)), index)}

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"counts": Counts()}


class OddStates(Small):
    """Its optimizer has states of other types than the weights."""

    def wrap_sgd(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.context.wrap_optimizer(OddOptimizer(model.parameters()))


class ChangesCheckpoints(PyTorchCallback):
    """Notes what its hooks find. Changes what is saved, and what is loaded."""

    def __init__(self, trial: Small) -> None:
        self.trial = trial

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        self.trial.note("saved", {name: len(checkpoint[name]) for name in checkpoint
                                  if name.endswith("state_dict")})  # fmt: skip
        weights = checkpoint["models_state_dict"][1]
        weights["bias"] = torch.full_like(weights["bias"], 5.0)

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
        self.trial.note("loaded", checkpoint["models_state_dict"][1]["bias"].tolist())
        checkpoint["models_state_dict"][1]["bias"] = torch.full((1,), 7.0)
        del checkpoint["optimizers_state_dict"], checkpoint["scaler_state_dict"]

    def on_training_start(self) -> None:
        trial = self.trial
        self.trial.note("started", [trial.head.bias.tolist(), len(trial.optimizers[0].state)])

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        self.trial.note("written", sorted(path.name for path in Path(checkpoint_dir).iterdir()))


class Hooked(Everything):
    """Changes its checkpoints."""

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"changes": ChangesCheckpoints(self)}


class FullDataset(Small):
    """Validates the whole set in one call. Other parameter names; metrics as a tensor."""

    evaluate_batch = PyTorchTrial.evaluate_batch  # as if it had never been defined

    def train_batch(self, data: Any, epoch: int, number: int) -> Any:
        super().train_batch(data, epoch, number)
        return torch.tensor(float(self.context.distributed.get_rank() + 10 * number))

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        seen = [float(one) for _, index in data_loader for one in index]
        self.note("validated", seen)
        return {"loss": sum(seen)}


class Scaled(Small):
    """Scales its losses itself. One of a rank's gradients is infinite in the second batch."""

    def build(self) -> None:
        super().build()
        self.scaler = self.context.wrap_scaler(
            torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        )

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        inputs, index = batch
        loss = self.loss(self.model(inputs), index)
        if batch_idx == 1 and 7.0 in index:
            loss = loss * float("inf")
        self.context.backward(self.scaler.scale(loss))
        self.scaler.unscale_(self.optimizer)
        self.context.step_optimizer(self.optimizer, scaler=self.scaler)
        self.scaler.update()
        self.note("scale", self.scaler.get_scale())
        return {"loss": torch.zeros(())}


class ScaledAtTimes(Scaled):
    """Scales its losses itself. In each batch one of two ranks has no gradient.

    In the second batch, the gradients of the other one are infinite.
    """

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        inputs, index = batch
        loss = self.loss(self.model(inputs), index) * (float("inf") if batch_idx == 1 else 1.0)
        scaled = self.scaler.scale(loss)
        if self.context.distributed.get_rank() == batch_idx % 2:
            self.context.backward(scaled)
        self.scaler.unscale_(self.optimizer)
        self.context.step_optimizer(self.optimizer, scaler=self.scaler)
        self.scaler.update()
        self.note("scale", self.scaler.get_scale())
        return {"loss": torch.zeros(())}


remembered: list[weakref.ref[Any]] = []


class Successive(Small):
    """Reports the metric ``left``: how many models of earlier trials are in memory."""

    def build(self) -> None:
        self.left = sum(each() is not None for each in remembered)
        super().build()
        remembered.extend(weakref.ref(each) for each in (self.model, unwrapped(self.model)))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        return {**super().train_batch(batch, epoch_idx, batch_idx), "left": float(self.left)}
