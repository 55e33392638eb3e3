"""The trial of `benchmarks.gpu`. Its validation does the same work with DeepSpeed alone."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.trial import new_engine
from trial_core.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext
from trial_core.pytorch import DataLoader, Reducer

WIDTH = 1024
"""As in `benchmarks.checkpoint`. The state has 16 bytes per parameter, over all ranks."""


class StateTrial(DeepSpeedTrial):
    """Linear layers under ZeRO-1.

    The validation metrics, each the maximum of the ranks:

    - save_seconds, load_seconds: of DeepSpeed's `save_checkpoint` and `load_checkpoint`;
    - bare_peak_bytes: the device memory that these, and bare training, take at most;
    - peak_bytes: the most that was taken since the last validation;
    - pinned_bytes: the most pinned host memory that torch has held so far.

    Hyperparameters: layers, batches (a turn of bare training), folder (for DeepSpeed's checkpoint),
    batch_size (by default 1), passes (more forward passes than training needs; by default 0).
    """

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(context.get_hparam("layers"))]
        self.engine = context.wrap_model_engine(new_engine(nn.Sequential(*layers), 1))

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        (batch,) = self.context.to_device(next(dataloader_iter))
        with torch.no_grad():
            for _ in range(self.context.get_hparams().get("passes", 0)):
                self.engine.module(batch)
        return {"loss": self._train(batch)}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        accelerator, folder = get_accelerator(), self.context.get_hparam("folder")
        figures = {
            "peak_bytes": accelerator.max_memory_allocated(),
            "pinned_bytes": _pinned_bytes(),
        }
        accelerator.reset_peak_memory_stats()
        batch = torch.ones(1, WIDTH, device=self.engine.device)
        with torch.enable_grad():
            for _ in range(self.context.get_hparam("batches")):
                self._train(batch)
        figures["save_seconds"] = _timed(lambda: self.engine.save_checkpoint(folder, tag="bare"))
        figures["load_seconds"] = _timed(lambda: self.engine.load_checkpoint(folder, tag="bare"))
        figures["bare_peak_bytes"] = accelerator.max_memory_allocated()
        if self.context.distributed.get_rank() == 0:
            shutil.rmtree(folder)
        accelerator.reset_peak_memory_stats()
        return figures

    def evaluation_reducer(self) -> Reducer:
        return Reducer.MAX

    def build_training_data_loader(self) -> DataLoader:
        size = self.context.get_hparams().get("batch_size", 1)
        return DataLoader(
            TensorDataset(torch.ones(1, WIDTH).expand(256 * size, -1)), batch_size=size
        )

    def build_validation_data_loader(self) -> DataLoader:
        # One micro-batch, so one turn, on every rank.
        return DataLoader(TensorDataset(torch.zeros(self.context.distributed.get_size())))

    def _train(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.engine(batch).square().mean()
        self.engine.backward(loss)
        self.engine.step()
        return loss


def _timed(work: Callable[[], Any]) -> float:
    """Return seconds from a barrier until all ranks are done. Collective: every rank calls this."""
    get_accelerator().synchronize()
    dist.barrier()
    began = time.perf_counter()
    work()
    get_accelerator().synchronize()
    dist.barrier()
    return time.perf_counter() - began


def _pinned_bytes() -> int:
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))
