"""Batch inference; rank 1 kills itself once, at a batch that a hyperparameter names."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from trial_core.pytorch.experimental import (
    TorchBatchProcessor,
    TorchBatchProcessorContext,
    torch_batch_process,
)


class Double(TorchBatchProcessor):
    def __init__(self, context: TorchBatchProcessorContext) -> None:
        self.context, self.hparams = context, context.get_hparams()
        self.total = context.wrap_reducer(sum, name="total")

    def process_batch(self, batch: Any, batch_idx: int) -> None:
        once = Path(self.hparams["record"]) / "once"
        is_second = self.context.get_distributed_rank() == 1
        if is_second and batch_idx == self.hparams["kill_at"] and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        doubled = 2 * self.context.to_device(batch)
        self.total.update(doubled.sum().item())
        with self.context.upload_path() as folder:
            (folder / f"{batch_idx}.txt").write_text(" ".join(map(str, doubled.tolist())))


if __name__ == "__main__":
    torch_batch_process(Double, range(21), batch_size=2, checkpoint_interval=2)
