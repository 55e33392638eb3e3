"""Trials that print more than anybody wants to read."""

from __future__ import annotations

from typing import Any

from toy_trial import ToyTrial

LINES = 100_000


class Printing(ToyTrial):
    """Prints 100 000 lines in its third batch."""

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        if batch_idx == 2:
            print("\n".join(f"line {i}" for i in range(LINES)), flush=True)
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)
