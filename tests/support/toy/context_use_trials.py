"""Toy trials that use their context."""

from __future__ import annotations

import json
import os
import shutil
from typing import Any

import deepspeed
import torch
from toy_trial import ToyTrial, samples

from trial_core.deepspeed import DeepSpeedTrialContext
from trial_core.pytorch import DataLoader


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


class WithoutUploads(Measuring):
    """As `Measuring`, with uploads switched off."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        context.set_enable_tensorboard_logging(False)


class InitialisesDistributed(ToyTrial):
    """Initialises torch.distributed itself, and uses it at once."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.was_initialised = torch.distributed.is_initialized()
        deepspeed.init_distributed(dist_backend="gloo")
        self.gathered = context.distributed.allgather(context.distributed.get_rank())
        super().__init__(context)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        with self._file("init").open("a") as file:
            file.write(json.dumps([self.was_initialised, self.gathered]) + "\n")
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)


class RecordsBuildTools(ToyTrial):
    """Records which ninja this rank would call, and its folder for builds."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        with self._file("tools").open("a") as file:
            tools = [shutil.which("ninja"), os.environ.get("TORCH_EXTENSIONS_DIR")]
            file.write(json.dumps(tools) + "\n")


class RecordsRanks(ToyTrial):
    """Records its rank and the results of collectives in every batch."""

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        ranks = self.context.distributed
        mine = {"rank": ranks.get_rank(), "batch": batch_idx}
        seen = {
            "who": [
                ranks.get_rank(), ranks.get_size(), ranks.get_local_rank(), ranks.get_num_agents(),
            ],
            "attributes": [
                ranks.rank, ranks.size, ranks.local_rank, ranks.local_size, ranks.cross_rank,
                ranks.cross_size,
            ],
            "allgather": ranks.allgather(mine),
            "gather": ranks.gather(mine),
            "broadcast": ranks.broadcast(mine),
            "allgather_local": ranks.allgather_local(mine),
            "gather_local": ranks.gather_local(mine),
            "broadcast_local": ranks.broadcast_local(mine),
        }  # fmt: skip
        with self._file("ranks").open("a") as file:
            file.write(json.dumps(seen) + "\n")
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)


class RecordsPosition(ToyTrial):
    """Records the context's batch and epoch bounds in every batch."""

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


class ContextWithMiddle(DeepSpeedTrialContext):
    """A context with one more method."""

    def middle(self, numbers: list[int]) -> float:
        """The mean of `numbers`."""
        return sum(numbers) / len(numbers)


class CustomContext(ToyTrial):
    """Names its context class, and uses the added method."""

    trial_context_class = ContextWithMiddle
    context: ContextWithMiddle

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        ranks_seen = self.context.distributed.allgather(self.context.distributed.get_rank())
        with self._file("middle").open("a") as file:
            file.write(json.dumps(self.context.middle(ranks_seen)) + "\n")
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)


class RecordsStopRequests(ToyTrial):
    """Records get_stop_requested after every batch. `do: stop` requests a stop."""

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        metrics = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        with self._file("stop").open("a") as file:
            file.write(json.dumps(self.context.get_stop_requested()) + "\n")
        return metrics


class Label:
    """`to_device` cannot move it."""


class NestedBatches(ToyTrial):
    """Its micro-batches are nested: dicts of lists of tuples of tensors, arrays, and a label."""

    def build_training_data_loader(self) -> DataLoader:
        def nest(rows: list[Any]) -> Any:
            inputs, index = (torch.stack(part) for part in zip(*rows, strict=True))
            return {"label": Label(), "data": [(inputs, index.numpy()), [index.numpy()]]}

        return DataLoader(
            samples(self.hparams["train_samples"]),
            batch_size=self.hparams["micro_batch_size"],
            collate_fn=nest,
        )

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        moved = self.context.to_device(next(dataloader_iter))
        (inputs, index), [again] = moved["data"]
        tensors = [inputs, index, again]
        seen = {
            "devices": [str(tensor.device) for tensor in tensors],
            "own": str(self.context.device),
            "kinds": [type(each).__name__ for each in (moved, moved["data"], moved["data"][0])],
            "index": again.flatten().tolist(),
        }
        with self._file("moved").open("a") as file:
            file.write(json.dumps(seen) + "\n")
        return super().train_batch(iter([(inputs, index)]), epoch_idx, batch_idx)
