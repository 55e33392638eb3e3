"""Batch inference: each slot processes its share of a data set, once. Follows Determined's."""

from __future__ import annotations

import math
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from trial_core.checkpoint.transfer.run_files import RunFiles
from trial_core.errors import StorageError, TrialValueError
from trial_core.rank.collectives.accelerator import claim_accelerator
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.collectives.rendezvous import init_torch_distributed
from trial_core.rank.core_api.context import Context
from trial_core.rank.core_api.init import init
from trial_core.rank.data.dataloader import DataLoader
from trial_core.rank.trial.custom_reducers import ReducerRegistry
from trial_core.rank.trial.device_transfer import to_device


class TorchBatchProcessorContext:
    """Passed to a `TorchBatchProcessor`'s ``__init__`` on every rank.

    `wrap_reducer` works as in trials: the results of a run are reported as a validation's metrics
    when it ends. `report_metrics` and `get_tensorboard_path` work as in `TrainContext`.
    """

    def __init__(self, core_context: Context) -> None:
        self.device = get_default_device(core_context)
        self.reducers = ReducerRegistry()
        self.wrap_reducer = self.reducers.wrap
        self.report_metrics = core_context.train.report_metrics
        self.get_tensorboard_path = core_context.train.get_tensorboard_path
        self.get_distributed_rank = core_context.distributed.get_rank
        self.get_distributed_size = core_context.distributed.get_size
        self.get_hparams = lambda: core_context.info.trial.hparams
        self.to_device = partial(to_device, device=self.device, warned_types=set())
        self._core = core_context

    def prepare_model_for_inference(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model in evaluation mode, on this rank's device."""
        return model.eval().to(self.device)

    @contextmanager
    def upload_path(self) -> Iterator[Path]:
        """A folder whose files the end of the block stores, in place of files of the same names.

        They are in ``runs/{trial}/outputs/rank-N`` next to the checkpoints, until you delete them.
        """
        host, into = self._core.host, f"outputs/rank-{self.get_distributed_rank()}"
        store = host.files.store
        if store.is_process_local:
            raise StorageError(f"context.upload_path: ranks cannot write into {store.url}")
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as copies:
            yield Path(folder)
            RunFiles(store, host.run.trial, Path(folder), into, Path(copies)).upload_changed()


class TorchBatchProcessor(ABC):
    """What to do with each batch. Each rank has an instance."""

    @abstractmethod
    def __init__(self, context: TorchBatchProcessorContext) -> None:
        """Load the model."""

    @abstractmethod
    def process_batch(self, batch: Any, batch_idx: int) -> None:
        """Process a batch; `batch_idx` counts this rank's batches before it, in all runs."""

    def on_checkpoint_start(self) -> None:  # noqa: B027 - may be overridden
        """Called before progress is stored: store the results of all batches until now."""

    def on_finish(self) -> None:  # noqa: B027 - may be overridden
        """Called after the last batch, once its progress is stored."""


def get_default_device(core_context: Context) -> torch.device:
    """This rank's device."""
    return torch.device(get_accelerator().current_device_name())


def torch_batch_process(
    batch_processor_cls: type[TorchBatchProcessor],
    dataset: Any,
    batch_size: int | None = None,
    max_batches: int | None = None,
    checkpoint_interval: int = 5,
    dataloader_kwargs: Mapping[str, Any] | None = None,
    distributed_context: DistributedContext | None = None,
) -> None:
    """Process a data set once. Collective: every rank calls this, in place of `trial_core.init`.

    Batch *g* goes to rank ``g % ranks``. A resumed run, even on another number of slots, continues
    from its last checkpoint: a batch may be processed twice, and none is left out.

    Args:
        batch_size, max_batches, checkpoint_interval: of each rank; default: 1, all, 5.
        dataloader_kwargs: other arguments of `trial_core.pytorch.DataLoader`.

    Raises:
        TrialValueError: an argument is invalid.
    """
    options = dict(dataloader_kwargs or {})
    size = batch_size or options.pop("batch_size", 1)
    if any(options.get(each) for each in ("batch_size", "shuffle", "sampler", "batch_sampler")):
        raise TrialValueError(
            "torch_batch_process takes batches in their order: dataloader_kwargs has no shuffle, "
            "sampler and batch_sampler, and batch_size is given once"
        )
    if checkpoint_interval < 1 or not hasattr(dataset, "__len__"):
        raise TrialValueError(
            "torch_batch_process needs a data set with a length, and a checkpoint_interval of at "
            f"least 1; got {type(dataset).__name__} and {checkpoint_interval}"
        )
    ranks = distributed_context or DistributedContext.from_environment()
    claim_accelerator(ranks.get_local_rank())
    if ranks.get_size() > 1 and not dist.is_initialized():
        init_torch_distributed()
    loader = DataLoader(dataset, size, **options)
    with init(distributed=ranks) as core_context:
        BatchRun(core_context, batch_processor_cls, loader, max_batches).run(checkpoint_interval)


class BatchRun:
    """One pass over the batches, on one rank. Progress is counted in batches of all ranks."""

    def __init__(
        self,
        core: Context,
        processor_class: type[TorchBatchProcessor],
        loader: DataLoader,
        max_batches: int | None = None,
    ) -> None:
        self._core, self._context = core, TorchBatchProcessorContext(core)
        self._ranks, self._rank = core.distributed.get_size(), core.distributed.get_rank()
        self._loader, self._total = loader, len(loader)
        if max_batches is not None and max_batches > 0:
            self._total = min(self._total, max_batches * self._ranks)
        latest = core.info.latest_checkpoint
        stored = core.checkpoint.get_metadata(latest) if latest is not None else {}
        self._done = min(self._total, stored.get("batches_done", 0))
        self._processor = processor_class(context=self._context)
        self._context.reducers.reset("validation")

    def run(self, interval: int) -> None:
        """Process the remaining batches; end early if the run is asked to stop."""
        first, ranks, rank = self._done, self._ranks, self._rank
        skip = max(0, math.ceil((first - rank) / ranks))
        batches = iter(self._loader.get_data_loader(skip=skip, num_replicas=ranks, rank=rank))
        # Every rank makes as many rounds; in the last one, some may have no batch.
        rounds = math.ceil((self._total - first) / ranks)
        for number in range(rounds):
            if (skip + number) * ranks + rank < self._total:
                self._processor.process_batch(batch=next(batches), batch_idx=skip + number)
            self._done = min(self._total, first + (number + 1) * ranks)
            stops = self._core.preempt.should_preempt()
            ends = stops or number + 1 == rounds
            if ends or (number + 1) % interval == 0:
                self._store(ends)
            if stops:
                return
        self._processor.on_finish()

    def _store(self, ends: bool) -> None:
        self._processor.on_checkpoint_start()
        core, steps = self._core, math.ceil(self._done / self._ranks)
        if ends:
            metrics = self._context.reducers.reduce("validation", core.distributed.allgather)
            if metrics and self._rank == 0:
                core.train.report_validation_metrics(steps, metrics)
        core.train.report_progress(self._done / self._total)
        metadata = {"steps_completed": steps, "batches_done": self._done}
        with core.checkpoint.store_path(metadata, shard=True):
            pass  # it holds the metadata alone
