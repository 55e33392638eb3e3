"""A PyTorchTrial and a DeepSpeedTrial with an optimizer that has train and eval modes."""

from __future__ import annotations

import json
from typing import Any

import deepspeed
import torch
from pytorch_trials import Small
from toy_trial import ToyTrial

from trial_core.callbacks import ExponentialMovingAverage
from trial_core.deepspeed import DeepSpeedTrialContext
from trial_core.pytorch import PyTorchCallback


class ScheduleFreeSGD(torch.optim.Optimizer):
    """As ``schedulefree.SGDScheduleFree``: switches in place, and only if it is in another mode."""

    def __init__(self, params: Any, lr: float = 0.05, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "train_mode": False, "k": 0})

    def train(self) -> None:
        self._switch(True, lambda beta: 1 - beta)

    def eval(self) -> None:
        self._switch(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def _switch(self, training: bool, weight: Any) -> None:
        for group in self.param_groups:
            if group["train_mode"] == training:
                continue
            group["train_mode"] = training
            for each in group["params"]:
                if "z" in self.state[each]:
                    each.lerp_(self.state[each]["z"], weight(group["beta"]))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("the optimizer is not in train mode")
            group["k"] += 1
            for each in group["params"]:
                if each.grad is None:
                    continue
                z = self.state[each].setdefault("z", each.clone())
                each.lerp_(z, 1 - 1 / group["beta"])
                z.sub_(each.grad, alpha=group["lr"])
                each.lerp_(z, 1 / group["k"]).lerp_(z, 1 - group["beta"])


class SwitchesItself(PyTorchCallback):
    """What the authors of such optimizers tell people to do."""

    def __init__(self, optimizer: ScheduleFreeSGD) -> None:
        self.optimizer = optimizer

    def on_validation_start(self) -> None:
        self.optimizer.eval()

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self.optimizer.train()

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        self.optimizer.eval()


class TwoModes(Small):
    """Records the weights that validations see. Hyperparameter: `switches`."""

    def build(self) -> None:
        self.model = self.wrap(torch.nn.Sequential(torch.nn.Linear(3, 1)).double())
        self.optimizer = self.context.wrap_optimizer(ScheduleFreeSGD(self.model.parameters()))

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        weight = next(self.model.parameters()).detach()
        whole = getattr(weight, "full_tensor", lambda: weight)()
        self.note("validated", float(whole.sum()))
        return super().evaluate_batch(batch)

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"modes": SwitchesItself(self.optimizer)} if self.hparams.get("switches") else {}


class TwoModesEngine(ToyTrial):
    """Its engine's optimizer has two modes. Records the weights that validations see.

    Hyperparameters: `zero_stage`, `batch_size`, `precision` (``bf16``), `switches`,
    `averages` (with an ExponentialMovingAverage).
    """

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            **self._batch(),
            "zero_optimization": {"stage": self.hparams["zero_stage"]},
            "zero_allow_untested_optimizer": True,
        }
        if precision := self.hparams.get("precision"):
            config[precision] = {"enabled": True}
        self.optimizer = ScheduleFreeSGD(model.parameters())
        self.optimizer.train()  # as its authors say
        engine, *_ = deepspeed.initialize(model=model, optimizer=self.optimizer, config=config)
        context.models.clear()
        self.engine = context.wrap_model_engine(engine)

    def _loss(self, inputs: Any, index: Any) -> Any:
        dtype = next(self.engine.module.parameters()).dtype
        outputs = self.engine(inputs.to(dtype)).float().sum(1, keepdim=True)
        return torch.nn.functional.mse_loss(outputs, index / 64)

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        weights = self.engine.module.named_parameters()
        seen = {name: each.detach().float().tolist() for name, each in weights}
        with self._file("validated").open("a") as file:
            file.write(json.dumps(seen) + "\n")
        return super().evaluate_batch(dataloader_iter, batch_idx)

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        if self.hparams.get("averages"):
            return {"average": ExponentialMovingAverage(decay=0.5)}
        return {"modes": SwitchesItself(self.optimizer)} if self.hparams.get("switches") else {}
