"""The seam between the one controller and the kinds of trial: all that differs lies behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from trial_core.checkpoint.manifest import FileEntry, Topology
from trial_core.checkpoint.resume_point import Restore
from trial_core.controller.safe_load import Reader
from trial_core.pytorch.callback import PyTorchCallback
from trial_core.pytorch.reducer import Reducer, ReducerRegistry
from trial_core.transfer.memory_files import MemoryFiles


class TrialEngine(Protocol):
    """A constructed trial, as the controller drives it. Every rank has one.

    Attributes:
        callbacks: the trial's callbacks, by name.
        reducers: the custom metrics that the trial has registered.
        data_parallel_rank: which shard of the data this rank takes.
        data_parallel_size: how many shards there are.
        reports_metrics: whether this rank's metrics count.
        needs_data: whether this rank needs data loaders at all.
        micro_batches_per_batch: micro-batches that one batch takes from this rank's loader.
        batch_samples: samples in one batch, all ranks together.
        micro_batches_per_evaluation: micro-batches that one `evaluate_batch` takes.
        evaluates_in_lockstep: whether a forward pass needs other ranks, so that all must evaluate
            equally often.
        pads_evaluation: where that is so, whether a rank whose shard is shorter goes on with
            batches that do not count; otherwise all ranks end with the shortest.
        evaluates_full_dataset: whether the trial validates the whole set in one go, on one rank.
        requires_reproducible_loaders: whether loaders must be `trial_core.pytorch.DataLoader`s.
    """

    callbacks: Mapping[str, PyTorchCallback]
    reducers: ReducerRegistry
    data_parallel_rank: int
    data_parallel_size: int
    reports_metrics: bool
    needs_data: bool
    micro_batches_per_batch: int
    batch_samples: int
    micro_batches_per_evaluation: int
    evaluates_in_lockstep: bool
    pads_evaluation: bool
    evaluates_full_dataset: bool
    requires_reproducible_loaders: bool

    def training_loader(self) -> Any:
        """What the trial's `build_training_data_loader` returns."""
        ...

    def validation_loader(self) -> Any:
        """What the trial's `build_validation_data_loader` returns."""
        ...

    def train_batch(
        self, micro_batches: Iterator[Any] | None, epoch_idx: int, batch_idx: int
    ) -> list[Any]:
        """Train one batch; the metrics of each of the trial's `train_batch` calls.

        Collective: every rank calls this. Must not wait for the accelerator.
        """
        ...

    def evaluate_batch(self, micro_batches: Iterator[Any] | None, batch_idx: int) -> Any:
        """The metrics of one of the trial's `evaluate_batch` calls."""
        ...

    def evaluate_full_dataset(self, loader: Any) -> Any:
        """The metrics of the whole validation set. Called on rank 0 alone."""
        ...

    def evaluation_reducer(self) -> Reducer | Mapping[str, Reducer]:
        """How per-batch validation metrics become one."""
        ...

    def set_training(self, training: bool) -> None:
        """Switch the models between training and evaluation mode."""
        ...

    def save(self, folder: Path, images: MemoryFiles) -> None:
        """Write this rank's shards below `folder`, in `images` as far as it can.

        Collective: every rank calls this.
        """
        ...

    def load(self, folder: Path, reader: Reader, reshape: bool = False) -> None:
        """Restore from all ranks' shards below `folder`. Collective: every rank calls this.

        Args:
            reshape: they are of another number of ranks, or of another ZeRO stage.
        """
        ...

    def load_weights(self, folder: Path, reader: Reader) -> None:
        """Load the models' weights alone. Collective: every rank calls this."""
        ...

    def files_read(
        self, files: list[FileEntry], saved_by: Topology, restore: Restore, ranks: Sequence[int]
    ) -> list[FileEntry]:
        """Those of a checkpoint's files that `load`, or `load_weights`, reads on some of `ranks`.

        The same on each of them. Not collective.

        Args:
            saved_by: how the ranks that saved it divided the work.
            restore: how much of it is to be restored.
        """
        ...

    def topology(self) -> Topology:
        """How the ranks divide the work."""
        ...
