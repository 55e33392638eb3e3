"""Trials that say, or measure, what a sample holds."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from pytorch_trials import Small
from toy_trial import ToyTrial

from trial_core.deepspeed import DeepSpeedTrialContext


class Says(ToyTrial):
    """Hyperparameter `work`: the arguments of `set_work_per_sample`."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        context.set_work_per_sample(**self.hparams["work"])


class SaysMoreLater(Small):
    """Samples have 8 tokens, and from batch 6 on 24."""

    def build(self) -> None:
        super().build()
        self.context.set_work_per_sample(tokens=8)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        if batch_idx == 6:
            self.context.set_work_per_sample(tokens=24)
        return super().train_batch(batch, epoch_idx, batch_idx)


class Profiled(ToyTrial):
    """DeepSpeed's flops profiler measures the third batch, of two micro-batches."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        context.models.clear()
        model = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Linear(16, 2))
        for parameter in model[0].parameters():
            parameter.requires_grad = not self.hparams.get("freezes", False)
        engine, *_ = deepspeed.initialize(
            model=model,
            config={
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 2,
                "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
                "flops_profiler": {"enabled": True, "profile_step": 2},
            },
            model_parameters=[each for each in model.parameters() if each.requires_grad],
        )
        self.engine = context.wrap_model_engine(engine)
