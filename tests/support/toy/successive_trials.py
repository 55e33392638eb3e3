"""A trial that tells whether earlier trials of its rank are still in memory."""

from __future__ import annotations

import weakref
from typing import Any

from toy_trial import ToyTrial

from trial_core.deepspeed import DeepSpeedTrialContext

engines: list[weakref.ref[Any]] = []


class Successive(ToyTrial):
    """Reports the metric ``left``: how many engines of earlier trials this rank has kept."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.left = sum(engine() is not None for engine in engines)
        super().__init__(context)
        engines.append(weakref.ref(self.engine))

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        metrics = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        return {**metrics, "left": float(self.left)}
