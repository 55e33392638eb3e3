"""`PyTorchTrialAdapter`: the `TrialAdapter` of a `PyTorchTrial`."""

from __future__ import annotations

import collections
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import FileEntry, Topology
from trial_core.checkpoint.resume_point import Restore
from trial_core.checkpoint.weights.model_files import facts_folder, write_facts
from trial_core.errors import TrialError
from trial_core.processes.machine.memory_files import MemoryFiles
from trial_core.pytorch.context import PyTorchTrialContext
from trial_core.pytorch.distributed_model import broadcast_buffers, unwrapped
from trial_core.pytorch.pytorch_state import (
    FROZEN_FILE,
    GRADIENTS,
    GRADIENTS_FOLDER,
    MODELS,
    OPTIMIZERS,
    SCHEDULERS,
    STATE_FILE,
    WEIGHTS,
    load_gradients,
    load_models,
    load_state,
    read_state,
    state_of,
    write_gradients,
    write_state,
)
from trial_core.pytorch.sharded_model import is_sharded, mesh_shape, reshard
from trial_core.pytorch.sharded_state import files_of_parts
from trial_core.pytorch.trial import PyTorchTrial
from trial_core.rank.rank_state import STATE_FOLDER
from trial_core.rank.state_files.built_settings import read_parameters
from trial_core.rank.state_files.parameter_order import states_by_name
from trial_core.rank.state_files.safe_load import Reader
from trial_core.rank.state_files.settings_parts import ScalerPart, SettingsPart
from trial_core.rank.trial.optimizer_modes import to_training_mode
from trial_core.rank.trial.trial_adapter import TrialAdapter


class PyTorchTrialAdapter(TrialAdapter):
    """Drives a `PyTorchTrial`; `TrialAdapter` documents the members.

    Collective: every rank constructs one. Raises TrialError if the trial wrapped no model or no
    optimizer, or cannot be validated.
    """

    _base = PyTorchTrial
    _trial: PyTorchTrial
    _context: PyTorchTrialContext
    checkpoint_classes = (collections.Counter, collections.defaultdict)
    chief_hooks = frozenset({"on_checkpoint_write_end", "on_checkpoint_end"})
    micro_batches_per_batch = 1
    micro_batches_per_evaluation = 1
    pads_evaluation = True
    shares_buffers = True
    reports_metrics = True
    entries_of_parts: Mapping[str, str] = {"optimizer": OPTIMIZERS, "scheduler": SCHEDULERS}
    needs_data = True

    def __init__(self, trial: PyTorchTrial, context: PyTorchTrialContext) -> None:
        name = type(trial).__name__
        for kind, wrapped in (("model", context.models), ("optimizer", context.optimizers)):
            if not wrapped:
                raise TrialError(
                    f"{name}.__init__ wrapped no {kind}; pass each one to context.wrap_{kind}"
                )
        super().__init__(trial, context)
        self.modules = [unwrapped(model) for model in context.models]
        self._note_frozen()
        self.optimizers = context.optimizers
        self.steps_each_batch = context.aggregation_frequency == 1
        self.data_parallel_rank = context.distributed.get_rank()
        self.data_parallel_size = context.distributed.get_size()
        averages = context.run_info.optimizations.average_training_metrics
        self.reports_training_metrics = averages or self.data_parallel_rank == 0
        self.batch_samples = 0
        if "global_batch_size" in context.get_hparams():
            self.batch_samples = context.get_per_slot_batch_size() * self.data_parallel_size
        is_any_sharded = any(map(is_sharded, context.models))
        self.evaluates_in_lockstep = is_any_sharded and self.data_parallel_size > 1
        self.whole_models = [] if is_any_sharded else context.models
        self.evaluates_full_dataset = self._full_dataset_is_evaluated(
            "a forward pass of models sharded with FSDP2 needs the other ranks"
            if self.evaluates_in_lockstep
            else None
        )
        self._train_batch = _by_name_or_position(trial.train_batch)
        self._evaluate_batch = _by_name_or_position(trial.evaluate_batch)
        self._has_buffers = any(True for model in context.models for _ in model.buffers())

    def train_batch(
        self,
        micro_batches: Iterator[Any] | None,
        epoch_idx: int,
        batch_idx: int,
        collect: Callable[[Any], None],
    ) -> None:
        batch = self._next(micro_batches)
        self._share_buffers()
        with self._context.training_batch():
            metrics = self._train_batch(
                {"batch": batch, "epoch_idx": epoch_idx, "batch_idx": batch_idx}
            )
        collect(metrics)

    def learning_rates(self) -> list[float | None]:
        return [float(each.param_groups[0]["lr"]) for each in self._context.optimizers]

    def scaled_steps(self) -> tuple[int, int]:
        return self._context.precision.steps, int(self._context.precision.skipped)

    def evaluate_batch(self, micro_batches: Iterator[Any] | None, batch_idx: int) -> Any:
        batch = self._next(micro_batches)
        with self._context.precision.autocast():
            return self._evaluate_batch({"batch": batch, "batch_idx": batch_idx})

    def evaluate_full_dataset(self, loader: Any) -> Any:
        with self._context.precision.autocast():
            return super().evaluate_full_dataset(loader)

    def set_training(self, training: bool) -> None:
        if not training:
            self._share_buffers()  # ranks may call the models a different number of times
        for model in self._context.models:
            model.train(training)
            if training:
                reshard(model)

    @property
    def schedulers(self) -> list[Any]:
        return [each.scheduler for each in self._context.lr_schedulers]

    def setting_parts(self) -> list[SettingsPart]:
        scaler = self._context.scaler
        return [*super().setting_parts(), *([] if scaler is None else [ScalerPart(scaler)])]

    def hook_state(self) -> dict[str, Any]:
        return state_of(self._context)

    def read_hook_state(self, folder: Path, reader: Reader) -> dict[str, Any]:
        return read_state(folder, reader, (MODELS, WEIGHTS, OPTIMIZERS), self._context)

    def save(
        self, folder: Path, memory_files: MemoryFiles, reader: Reader, hook_state: Mapping[str, Any]
    ) -> None:
        # `hook_state` has the trained weights themselves, and on_checkpoint_save_start may switch.
        to_training_mode(self.optimizers)
        write_state(self._context, folder, memory_files, reader, hook_state)
        if self._context.distributed.get_rank() == 0:
            for i, model in enumerate(self._context.models):
                write_facts(
                    unwrapped(model), folder / facts_folder(i), self._context.tokenizer_files
                )
        write_gradients(self._context, folder, memory_files)

    def load(
        self, folder: Path, reader: Reader, hook_state: Mapping[str, Any], reshape: bool = False
    ) -> None:
        saved = read_parameters(folder / STATE_FOLDER)
        with states_by_name(self.optimizers, self.named_modules, saved):
            load_state(self._context, hook_state)
        load_gradients(self._context, folder, reader)

    def load_weights(self, folder: Path, reader: Reader) -> None:
        load_models(self._context, read_state(folder, reader, (MODELS,), self._context))

    def files_read(
        self, files: list[FileEntry], saved_by: Topology, restore: Restore, ranks: Sequence[int]
    ) -> list[FileEntry]:
        read, kinds = {STATE_FILE, FROZEN_FILE, layout.IMPORTED}, [MODELS]
        if restore != "weights":
            read.add(STATE_FOLDER)
            kinds += [WEIGHTS, OPTIMIZERS]
        if restore == "everything":
            read.add(GRADIENTS_FOLDER)
            kinds.append(GRADIENTS)
        keeps_parts = saved_by.spreads_like(self.topology())
        shards = files_of_parts(files, kinds, ranks if keeps_parts else None)
        return [each for each in files if each.checked_path.partition("/")[0] in read] + shards

    def topology(self) -> Topology:
        ranks = self.data_parallel_size
        shape = mesh_shape(self._context.models)
        mesh = f" {'x'.join(map(str, shape))}" if len(shape) > 1 else ""
        return Topology(
            world_size=ranks,
            data_parallel_size=ranks,
            batch_samples=self.batch_samples,
            sharding=f"fsdp2{mesh}" if shape else "none",
        )

    def _next(self, micro_batches: Iterator[Any] | None) -> Any:
        batch = next(micro_batches)  # type: ignore[arg-type]  # never None: every rank needs data
        return self._context.to_device(batch) if self._context.moves_batches else batch

    def _share_buffers(self) -> None:
        # Before every batch, also between two optimizer steps, where DistributedDataParallel does
        # not: a checkpoint there would otherwise resume differently.
        if self._has_buffers and self.data_parallel_size > 1:
            broadcast_buffers(self._context.models)


def _by_name_or_position(method: Callable[..., Any]) -> Callable[[dict[str, Any]], Any]:
    """Calls `method` with arguments by name, as Determined does.

    A method with fewer parameters gets those that it names. One with other names gets the first
    arguments in their order.
    """
    parameters = inspect.signature(method).parameters.values()
    names = {each.name for each in parameters}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    takes_all = any(each.kind is each.VAR_POSITIONAL for each in parameters)

    def call(arguments: dict[str, Any]) -> Any:
        if takes_any or arguments.keys() <= names:
            return method(**arguments)
        if not takes_all and names <= arguments.keys():
            return method(**{name: arguments[name] for name in names})
        values = list(arguments.values())
        return method(*(values if takes_all else values[: len(names)]))

    return call
