"""Trials that tell whether earlier trials of their rank are still in memory."""

from __future__ import annotations

import weakref
from typing import Any

from parallel_trials import PipelineTrial
from toy_trial import ToyTrial

from trial_core.deepspeed import DeepSpeedTrialContext

remembered: list[weakref.ref[Any]] = []


class Successive(ToyTrial):
    """Reports the metric ``left``: how many engines and models of earlier trials are kept."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.left = sum(each() is not None for each in remembered)
        super().__init__(context)
        remembered.extend(weakref.ref(each) for each in (self.engine, self.engine.module))

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        metrics = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        return {**metrics, "left": float(self.left)}


class SuccessivePipeline(PipelineTrial):
    """The same of pipelines; process groups count as well."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.left = sum(each() is not None for each in remembered)
        super().__init__(context)
        module, grid = self.engine.module, self.engine.grid
        groups = [module.world_group, grid.pp_proc_group, grid.dp_proc_group]
        remembered.extend(weakref.ref(each) for each in (self.engine, module, *groups))

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        metrics = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        return {**metrics, "left": float(self.left)}
