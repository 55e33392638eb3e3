"""The trial of `benchmarks.report`: batches of about 50 ms, each with a log line."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.trial import LoopTrial
from trial_core.deepspeed import DeepSpeedTrialContext

SIZE = 256
WARM_UP_PRODUCTS = 200


class ReportedTrial(LoopTrial):
    """Multiplies matrices so that a batch takes `batch_seconds`.

    The number of products is measured once, so that a slower machine makes batches longer.

    Hyperparameters: as `LoopTrial`, and batch_seconds, chatty (a file: while it exists, every
    batch prints a line).
    """

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        self.matrix = torch.rand(SIZE, SIZE)
        self.chatty = Path(context.get_hparam("chatty"))
        self.multiply(WARM_UP_PRODUCTS)
        began = time.perf_counter()
        self.multiply(WARM_UP_PRODUCTS)
        each = (time.perf_counter() - began) / WARM_UP_PRODUCTS
        self.products = max(1, round(context.get_hparam("batch_seconds") / each))

    def multiply(self, products: int) -> None:
        """Keep one core busy."""
        for _ in range(products):
            torch.mm(self.matrix, self.matrix)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.multiply(self.products)
        metrics = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        if self.chatty.exists():
            print(f"batch {batch_idx} of epoch {epoch_idx} is trained", flush=True)
        return metrics
