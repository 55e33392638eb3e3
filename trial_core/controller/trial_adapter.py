"""The interface between the controller and one kind of trial."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from trial_core.checkpoint.manifest import FileEntry, Topology
from trial_core.checkpoint.resume_point import Restore
from trial_core.controller.safe_load import Reader
from trial_core.pytorch.callback import PyTorchCallback
from trial_core.pytorch.custom_reducers import ReducerRegistry
from trial_core.pytorch.metric_reduction import Reducer
from trial_core.transfer.memory_files import MemoryFiles


class TrialAdapter(Protocol):
    """A constructed trial, as the controller drives it. Every rank has one.

    Attributes:
        whole_models: the models that are whole on this rank, so that their forward passes wait for
            no other rank.
        callbacks: the trial's callbacks, by name.
        reducers: the trial's custom reducers.
        data_parallel_rank: this rank's data shard.
        data_parallel_size: the number of data shards.
        reports_metrics: whether this rank's metrics count.
        reports_training_metrics: whether its training metrics count, too.
        needs_data: whether this rank needs data loaders.
        micro_batches_per_batch: micro-batches of one batch from this rank's loader.
        batch_samples: samples of one batch, over all ranks; 0: unknown.
        micro_batches_per_evaluation: micro-batches that one `evaluate_batch` takes.
        evaluates_in_lockstep: whether a forward pass needs other ranks, so that all ranks must
            evaluate equally often.
        pads_evaluation: in lockstep, whether a rank with a shorter shard continues with batches
            that do not count. Otherwise all ranks end with the shortest shard.
        evaluates_full_dataset: whether the trial validates the whole set at once, on one rank.
        requires_reproducible_loaders: whether loaders must be `trial_core.pytorch.DataLoader`s.
        chief_hooks: the callbacks' hooks that rank 0 alone calls.
    """

    whole_models: Sequence[Any]
    callbacks: Mapping[str, PyTorchCallback]
    reducers: ReducerRegistry
    data_parallel_rank: int
    data_parallel_size: int
    reports_metrics: bool
    reports_training_metrics: bool
    needs_data: bool
    micro_batches_per_batch: int
    batch_samples: int
    micro_batches_per_evaluation: int
    evaluates_in_lockstep: bool
    pads_evaluation: bool
    evaluates_full_dataset: bool
    requires_reproducible_loaders: bool
    chief_hooks: frozenset[str]

    @property
    def rehearses_save(self) -> bool:
        """Whether `save` can be tried, and should be, because the first one takes longer.

        It runs no code of the trial, writes memory files only, and copies from an accelerator. The
        same on every rank.
        """

    @property
    def checkpoint_classes(self) -> Sequence[Any]:
        """Classes besides plain data that the shards hold, all of them safe to construct."""

    def training_loader(self) -> Any:
        """The result of the trial's `build_training_data_loader`."""

    def validation_loader(self) -> Any:
        """The result of the trial's `build_validation_data_loader`."""

    def train_batch(
        self, micro_batches: Iterator[Any] | None, epoch_idx: int, batch_idx: int
    ) -> list[Any]:
        """Train one batch; the metrics of each of the trial's `train_batch` calls.

        Collective: every rank calls this. Must not wait for the accelerator.
        """

    def learning_rates(self) -> list[float | None]:
        """Of the first parameter group of each optimizer; None for an engine without one."""

    def scaled_steps(self) -> tuple[int, int]:
        """Optimizer steps with a loss scaler so far, and how many of them the scaler skipped.

        May wait for the accelerator.
        """

    def evaluate_batch(self, micro_batches: Iterator[Any] | None, batch_idx: int) -> Any:
        """The metrics of one of the trial's `evaluate_batch` calls."""

    def evaluate_full_dataset(self, loader: Any) -> Any:
        """The metrics of the whole validation set. Called on rank 0 alone."""

    def evaluation_reducer(self) -> Reducer | Mapping[str, Reducer]:
        """How per-batch validation metrics are reduced."""

    def set_training(self, training: bool) -> None:
        """Switch the models between training and evaluation mode."""

    def accelerator_rng_state(self) -> dict[str, Any]:
        """The states of this rank's generators on its accelerator, by name."""

    def restore_accelerator_rng(self, states: Mapping[str, Any]) -> None:
        """Restore those states that `accelerator_rng_state` names, as far as they are given."""

    def hook_state(self) -> dict[str, Any]:
        """What `on_checkpoint_save_start` finds beside the rank's state, by the reference's names.

        Collective: every rank calls this.
        """

    def read_hook_state(self, folder: Path, reader: Reader) -> dict[str, Any]:
        """What `on_checkpoint_load_start` finds beside the rank's state. Not collective."""

    def save(
        self,
        folder: Path,
        memory_files: MemoryFiles,
        reader: Reader,
        hook_state: Mapping[str, Any],
    ) -> None:
        """Write this rank's shards below `folder`, as far as possible as memory files.

        Collective: every rank calls this.

        Args:
            reader: will read the shards; see `safe_save.readable`.
            hook_state: the result of `hook_state`, as the hooks left it.
        """

    def load(
        self, folder: Path, reader: Reader, hook_state: Mapping[str, Any], reshape: bool = False
    ) -> None:
        """Restore from all ranks' shards below `folder`. Collective: every rank calls this.

        Args:
            hook_state: the result of `read_hook_state`, as the hooks left it.
            reshape: whether the shards are of another number of ranks, or another sharding.
        """

    def load_weights(self, folder: Path, reader: Reader) -> None:
        """Load the models' weights alone. Collective: every rank calls this."""

    def files_read(
        self, files: list[FileEntry], saved_by: Topology, restore: Restore, ranks: Sequence[int]
    ) -> list[FileEntry]:
        """The files of a checkpoint that `load` or `load_weights` reads on any of `ranks`.

        The same on each of these ranks. Not collective.

        Args:
            saved_by: the topology that saved the checkpoint.
        """

    def topology(self) -> Topology:
        """How the ranks divide the work."""

    def destroy(self) -> None:
        """Free what the library holds of the trial, which is not used any more."""
