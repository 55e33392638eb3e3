"""The interface between the controller and one kind of trial."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trial_core.checkpoint.manifest import FileEntry, Topology
from trial_core.checkpoint.resume_point import Restore
from trial_core.errors import TrialError, TrialTypeError, TrialValueError
from trial_core.processes.machine.memory_files import MemoryFiles
from trial_core.rank.collectives.accelerator import has_accelerator
from trial_core.rank.state_files.frozen_as_built import FrozenAsBuilt
from trial_core.rank.state_files.safe_load import Reader
from trial_core.rank.state_files.settings_parts import OptimizerPart, SchedulePart, SettingsPart
from trial_core.rank.trial.callback import PyTorchCallback, built_callbacks
from trial_core.rank.trial.custom_reducers import ReducerRegistry
from trial_core.rank.trial.metric_reduction import Reducer
from trial_core.rank.trial.optimizer_modes import WeightCopies


class TrialAdapter(ABC):
    """A constructed trial, as the controller drives it. Every rank has one.

    Attributes:
        modules: the trained modules, without wrappers.
        optimizers: torch's optimizers; DeepSpeed's engines have wrapped theirs.
        weight_copies: of optimizers with train and eval modes, where the models compute with copies
            of their parameters.
        shares_buffers: True if all ranks get rank 0's buffers before each batch and validation.
        whole_models: the models that are whole on this rank, so that their forward passes wait for
            no other rank.
        data_parallel_rank: this rank's data shard.
        steps_each_batch: False if gradients of several batches are added up before a step.
        batch_samples: samples of one batch, over all ranks; 0 if unknown.
        micro_batches_per_evaluation: micro-batches that one `evaluate_batch` takes.
        evaluates_in_lockstep: True if a forward pass needs other ranks, so that all ranks must
            evaluate equally often.
        pads_evaluation: in lockstep, True if a rank with a shorter shard continues with batches
            that do not count. Otherwise all ranks end with the shortest shard.
        evaluates_full_dataset: True if the trial validates the whole set at once, on one rank.
        requires_reproducible_loaders: True if loaders must be `trial_core.pytorch.DataLoader`s.
        saves_plainly, loads_plainly: True, on all ranks, if `save` and `load` run no method of the
            trial of that name, which may read any file.
        chief_hooks: the callbacks' hooks that rank 0 alone calls.
        entries_of_parts: for a kind of `SettingsPart`, the entry of `hook_state` that lists their
            states.
        checkpoint_classes: classes besides plain data that the shards hold, all of them safe to
            construct.
    """

    _base: type
    """Our class that a trial of this kind is derived from."""

    modules: Sequence[torch.nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    weight_copies: Sequence[WeightCopies] = ()
    shares_buffers: bool = False
    whole_models: Sequence[Any]
    data_parallel_rank: int
    data_parallel_size: int
    reports_metrics: bool
    reports_training_metrics: bool
    needs_data: bool
    micro_batches_per_batch: int
    steps_each_batch: bool = True
    batch_samples: int
    micro_batches_per_evaluation: int
    evaluates_in_lockstep: bool
    pads_evaluation: bool
    takes_smaller_micro_batches: bool = True
    evaluates_full_dataset: bool
    saves_plainly: bool = True
    loads_plainly: bool = True
    chief_hooks: frozenset[str] = frozenset()
    entries_of_parts: Mapping[str, str] = {}
    checkpoint_classes: Sequence[Any]

    def __init__(self, trial: Any, context: Any) -> None:
        self._trial = trial
        self._context = context
        self.callbacks: Mapping[str, PyTorchCallback] = built_callbacks(trial, context)
        self.reducers: ReducerRegistry = context.reducers
        self.requires_reproducible_loaders: bool = context.reproducible_loaders

    def _note_frozen(self) -> None:
        """Note the frozen parameters of `modules`, as far as checkpoints may leave them out."""
        if self._context.run_info.checkpointing.exclude_frozen_parameters:
            self._context.frozen_as_built = FrozenAsBuilt(self.modules, self._context.distributed)

    def _overrides(self, name: str) -> bool:
        return getattr(type(self._trial), name) is not getattr(self._base, name)

    def _full_dataset_is_evaluated(self, why_not: str | None) -> bool:
        """True if the trial defines `evaluate_full_dataset`, not `evaluate_batch`.

        `why_not` is the reason if a single rank cannot evaluate. Raises TrialError if the trial
        defines both, or neither, or one that a single rank cannot run.
        """
        name = type(self._trial).__name__
        in_batches = self._overrides("evaluate_batch")
        in_one_call = self._overrides("evaluate_full_dataset")
        if in_batches == in_one_call:
            defines = "both" if in_batches else "neither"
            raise TrialError(
                f"{name} defines {defines} of evaluate_batch and evaluate_full_dataset; define "
                "exactly one: evaluate_batch is called on every rank, evaluate_full_dataset on a "
                "single one"
            )
        if in_one_call and why_not is not None:
            raise TrialError(
                f"{name} defines evaluate_full_dataset, which runs on a single rank, but {why_not} "
                "and would wait for them forever; define evaluate_batch instead"
            )
        return in_one_call

    @property
    def rehearses_save(self) -> bool:
        """True if `save` can and should be tried, because the first one takes longer.

        It runs no code of the trial, writes memory files only, and copies from an accelerator. The
        same on every rank.
        """
        return has_accelerator() and self.saves_plainly

    @property
    @abstractmethod
    def schedulers(self) -> Sequence[Any]:
        """The schedulers so far: a trial may wrap some in `build_training_data_loader`."""

    @property
    def left_out(self) -> Sequence[Collection[str]]:
        """Of each module, the names of the parameters that the last `save` left out."""
        left_out: list[set[str]] = self._context.left_out
        return left_out

    @property
    def named_modules(self) -> Sequence[torch.nn.Module]:
        """The modules, if their parameters have the same names on all ranks; else none."""
        return self.modules

    def setting_parts(self) -> list[SettingsPart]:
        """The parts whose settings a restore compares, as they are now. See `BuiltSettings`."""
        named = self.named_modules
        return [
            *(OptimizerPart(each, self.schedulers, named) for each in self.optimizers),
            *(SchedulePart(each, self.schedulers) for each in self.schedulers),
        ]

    def training_loader(self) -> Any:
        return self._trial.build_training_data_loader()

    def validation_loader(self) -> Any:
        return self._trial.build_validation_data_loader()

    def samples_in(self, micro_batch: Any) -> int:
        """Samples of a micro-batch, as the trial counts them; 0 if it cannot.

        Raises TrialTypeError if the trial's `get_batch_length` returned no number.
        """
        try:
            length = self._trial.get_batch_length(micro_batch)
        except (TrialTypeError, TrialValueError):  # of `data_length`
            return 0
        try:
            return int(length)
        except (TypeError, ValueError):
            raise TrialTypeError(
                f"get_batch_length returned {length!r}; return the number of records of a batch"
            ) from None

    @abstractmethod
    def train_batch(
        self,
        micro_batches: Iterator[Any] | None,
        epoch_idx: int,
        batch_idx: int,
        collect: Callable[[Any], None],
    ) -> None:
        """Train one batch; `collect` gets the metrics of each of the trial's `train_batch` calls.

        Collective. Must not wait for the accelerator. Does not keep metrics: they may hold the
        graph of their computation.
        """

    @abstractmethod
    def learning_rates(self) -> list[float | None]:
        """The rate of each optimizer's first parameter group; None for an engine without one."""

    @abstractmethod
    def scaled_steps(self) -> tuple[int, int]:
        """Steps of loss scalers so far, and those skipped. May wait for the accelerator."""

    def measured_flops_per_sample(self) -> float:
        """FLOPs of the model's forward and backward pass on one sample, measured; 0 if unknown."""
        return 0.0

    @abstractmethod
    def evaluate_batch(self, micro_batches: Iterator[Any] | None, batch_idx: int) -> Any:
        """The metrics of one of the trial's `evaluate_batch` calls."""

    def evaluate_full_dataset(self, loader: Any) -> Any:
        """The metrics of the whole validation set. Called on rank 0 alone."""
        return self._trial.evaluate_full_dataset(loader)

    def evaluation_reducer(self) -> Reducer | Mapping[str, Reducer]:
        """How per-batch validation metrics are reduced."""
        reducers: Reducer | Mapping[str, Reducer] = self._trial.evaluation_reducer()
        return reducers

    @abstractmethod
    def set_training(self, training: bool) -> None:
        """Switch the models between training and evaluation mode."""

    def hook_state(self) -> dict[str, Any]:
        """Entries for `on_checkpoint_save_start`, by Determined's names. Collective."""
        return {}

    def read_hook_state(self, folder: Path, reader: Reader) -> dict[str, Any]:
        """Entries for `on_checkpoint_load_start`, by the same names. Not collective."""
        return {}

    @abstractmethod
    def save(
        self, folder: Path, memory_files: MemoryFiles, reader: Reader, hook_state: Mapping[str, Any]
    ) -> None:
        """Write this rank's shards below `folder`, as far as possible as memory files. Collective.

        `reader` will read them (see `safe_save.readable`). `hook_state` is the result of
        `hook_state`, as the hooks left it.
        """

    @abstractmethod
    def load(
        self, folder: Path, reader: Reader, hook_state: Mapping[str, Any], reshape: bool = False
    ) -> None:
        """Restore from all ranks' shards below `folder`. Collective: every rank calls this.

        `hook_state` is the result of `read_hook_state`, as the hooks left it. To `reshape`: the
        shards are from another number of ranks or sharding.
        """

    @abstractmethod
    def load_weights(self, folder: Path, reader: Reader) -> None:
        """Load the models' weights alone. Collective: every rank calls this."""

    @abstractmethod
    def files_read(
        self, files: list[FileEntry], saved_by: Topology, restore: Restore, ranks: Sequence[int]
    ) -> list[FileEntry]:
        """The files of a checkpoint that `load` or `load_weights` reads on any of `ranks`.

        The same on each of these ranks. Not collective.
        """

    @abstractmethod
    def topology(self) -> Topology:
        """How the ranks divide the work."""

    def destroy(self) -> None:  # noqa: B027 - torch frees what is not used any more
        """Free the library's objects of the trial, which is not used any more."""


def accepts(method: Callable[..., Any], *arguments: Any) -> bool:
    """Return whether a trial's method has parameters, of any name, for these arguments."""
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError:
        return False
    return True
