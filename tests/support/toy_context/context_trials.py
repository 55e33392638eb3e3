"""Toy trials that use what their context offers. Need the folder of `toy_trial` on their path."""

from __future__ import annotations

import json
from typing import Any

import deepspeed
import torch
from toy_trial import ToyTrial

from trial_core.deepspeed import DeepSpeedTrialContext


class Measuring(ToyTrial):
    """Writes numbers and a file for TensorBoard on every rank, and profiles batches 2 and 3."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        self.writer = context.get_tensorboard_writer()
        context.set_profiler(
            activities=[torch.profiler.ProfilerActivity.CPU],
            schedule=torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1),
            on_trace_ready=lambda profile: None,  # overridden, as in the reference
        )

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        rank = self.context.distributed.get_rank()
        self.writer.add_scalar("own", 100 * rank + batch_idx, batch_idx)
        note = self.context.get_tensorboard_path() / "note.txt"
        note.write_text(f"rank {rank} at batch {batch_idx}")
        with torch.profiler.record_function(f"toy_batch_{batch_idx}"):
            return super().train_batch(dataloader_iter, epoch_idx, batch_idx)


class KeepsItLocal(Measuring):
    """The same, but asks for nothing to be uploaded."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        context.set_enable_tensorboard_logging(False)


class InitialisesItself(ToyTrial):
    """Initialises torch.distributed in its own way, and uses it at once."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.was_initialised = torch.distributed.is_initialized()
        deepspeed.init_distributed(dist_backend="gloo")
        self.everybody = context.distributed.allgather(context.distributed.get_rank())
        super().__init__(context)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        with self._file("init").open("a") as file:
            file.write(json.dumps([self.was_initialised, self.everybody]) + "\n")
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)


class AsksWhereItIs(ToyTrial):
    """Writes down what its context says of every batch."""

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        where = [
            batch_idx,
            self.context.current_train_batch(),
            self.context.is_epoch_start(),
            self.context.is_epoch_end(),
        ]
        with self._file("where").open("a") as file:
            file.write(json.dumps(where) + "\n")
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)
