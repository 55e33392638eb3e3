"""Toys that train no further than some batches beyond a checkpoint, until a break is agreed on.

Hyperparameters besides the toys' own: ahead (how many batches); breaks (a file whose size is the
number of breaks that all ranks have paused for).
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from pytorch_trials import Small
from toy_trial import ToyTrial

from trial_core.pytorch import PyTorchCallback

LIMIT_SECONDS = 60


class Pace(PyTorchCallback):
    """Lets a workload go on for some batches, and then until it has a break."""

    def __init__(self, hparams: dict[str, Any]) -> None:
        self.ahead: int = hparams["ahead"]
        self.breaks = Path(hparams["breaks"])
        self.begin()

    def begin(self) -> None:
        self.batches, self.seen = 0, self.breaks.stat().st_size

    def on_training_workload_end(self, avg_metrics: Any, batch_metrics: Any) -> None:
        self.begin()

    def begin_batch(self) -> None:
        """Called before each batch."""
        self.batches += 1
        deadline = time.monotonic() + LIMIT_SECONDS
        while self.batches >= self.ahead and self.breaks.stat().st_size == self.seen:
            assert time.monotonic() < deadline, "no checkpoint ends the workload"
            time.sleep(0.005)


class PacedTrial(ToyTrial):
    """A `DeepSpeedTrial`."""

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        self.pace = Pace(self.hparams)
        return {"pace": self.pace}

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.pace.begin_batch()
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)


class PacedPyTorchTrial(Small):
    """A `PyTorchTrial`, whose rank 1 is killed `at_batch`, once: see `ToyTrial`."""

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        self.pace = Pace(self.hparams)
        return {"pace": self.pace}

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.pace.begin_batch()
        once = Path(self.hparams["once"])
        is_there = batch_idx == self.hparams["at_batch"] and not once.exists()
        if is_there and self.context.distributed.get_rank() == 1:
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.note("samples", [batch_idx])
        return super().train_batch(batch, epoch_idx, batch_idx)
