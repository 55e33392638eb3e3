"""A trial that tells whether earlier trials of its rank are still in memory."""

from __future__ import annotations

import weakref
from typing import Any

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
