"""Trials on which one rank is slower than the others."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils.data import Dataset
from toy_trial import ToyTrial, samples

from trial_core.deepspeed import DeepSpeedTrialContext
from trial_core.pytorch import DataLoader


class Slow(Dataset[Any]):
    """The toy's samples, each after a while."""

    def __init__(self, count: int, seconds: float) -> None:
        self.samples = samples(count)
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return self.samples[index]


class SlowData(ToyTrial):
    """Rank 1 waits for its data."""

    def build_training_data_loader(self) -> DataLoader:
        seconds = 0.02 if self.context.distributed.get_rank() == 1 else 0.0
        return DataLoader(Slow(64, seconds), batch_size=2)


class SlowCompute(ToyTrial):
    """Rank 1 has a slow accelerator."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        if context.distributed.get_rank() == 1:
            model = self.engine.module
            forward = model.forward

            def slow(inputs: torch.Tensor) -> torch.Tensor:
                time.sleep(0.02)
                return forward(inputs)

            model.forward = slow
