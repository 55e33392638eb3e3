"""`DeepSpeedTrialAdapter`: the `TrialAdapter` of a `DeepSpeedTrial`."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.dataloader import DeepSpeedDataLoader, RepeatingLoader
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils import nvtx

from trial_core.checkpoint.manifest import FileEntry, Topology
from trial_core.checkpoint.resume_point import Restore
from trial_core.checkpoint.weights.model_files import facts_folder, write_facts
from trial_core.deepspeed.checkpoint_engine import CHECKPOINT_CLASSES, snapshot_checkpoint_engines
from trial_core.deepspeed.config_check import config_of
from trial_core.deepspeed.context import DeepSpeedTrialContext
from trial_core.deepspeed.engine_settings import (
    EngineOptimizer,
    engine_parts,
    names_of_copied,
    require_same_order,
)
from trial_core.deepspeed.export.pipeline_weights import layer_name, tied_layers
from trial_core.deepspeed.mpu import check_mpu
from trial_core.deepspeed.reshard.reshard_loader import (
    is_of_other_precision,
    is_ordered_otherwise,
    resharded,
)
from trial_core.deepspeed.restore_files import (
    files_for_load,
    files_for_load_weights,
    files_for_ranks,
)
from trial_core.deepspeed.trial import DeepSpeedTrial
from trial_core.deepspeed.validated_weights import check_modes, copies_of_modes
from trial_core.errors import CheckpointError, TrialError, TrialValueError
from trial_core.processes.machine.memory_files import MemoryFiles
from trial_core.rank.rank_state import STATE_FOLDER
from trial_core.rank.state_files.built_settings import read_parameters
from trial_core.rank.state_files.compiled_names import name_as_uncompiled
from trial_core.rank.state_files.optimizer_load import optimizers_loaded_in_place
from trial_core.rank.state_files.parameter_order import states_by_name
from trial_core.rank.state_files.safe_load import Reader
from trial_core.rank.state_files.settings_parts import SettingsPart
from trial_core.rank.trial.optimizer_modes import to_training_mode
from trial_core.rank.trial.trial_adapter import TrialAdapter, accepts

logger = logging.getLogger(__name__)


class DeepSpeedTrialAdapter(TrialAdapter):
    """Drives a `DeepSpeedTrial`; `TrialAdapter` documents the members.

    Collective: every rank constructs one. Raises TrialError if the trial wrapped no engine, or the
    ranks' `ModelParallelUnit`s are inconsistent, or the trial cannot be validated, or cannot
    accumulate gradients.
    """

    _base = DeepSpeedTrial
    _trial: DeepSpeedTrial
    _context: DeepSpeedTrialContext
    checkpoint_classes = CHECKPOINT_CLASSES

    def __init__(self, trial: DeepSpeedTrial, context: DeepSpeedTrialContext) -> None:
        if not context.models:
            raise TrialError(
                f"{type(trial).__name__}.__init__ wrapped no engine; pass what "
                "deepspeed.initialize returns first to context.wrap_model_engine"
            )
        check_mpu(context.mpu, context.distributed)
        super().__init__(trial, context)
        self.modules = [engine.module for engine in context.models]
        self._note_frozen()
        self.saves_plainly = not self._overrides("save")
        self.loads_plainly = not self._overrides("load")
        parameters = (each for module in self.modules for each in module.parameters())
        self._required_grad = [(each, each.requires_grad) for each in parameters]
        self.optimizers = [each.basic_optimizer for each in _with_optimizer(context.models)]
        first = context.models[0]
        is_pipeline = context.use_pipeline_parallel
        self.data_parallel_rank = context.mpu.data_parallel_rank
        self.data_parallel_size = context.mpu.data_parallel_world_size
        self.reports_metrics = context.mpu.should_report_metrics
        self.reports_training_metrics = self.reports_metrics
        self.needs_data = context.mpu.should_build_data_loader
        self.micro_batches_per_batch = int(first.gradient_accumulation_steps())
        self.batch_samples = context.get_global_batch_size()
        accumulates = context.auto_grad_accumulation and not is_pipeline
        self._calls_per_batch = self.micro_batches_per_batch if accumulates else 1
        if self._calls_per_batch > 1 and not _is_managed(first):
            raise TrialError(
                "the DeepSpeed config's managed_gradient_accumulation is false, so that each "
                "engine.step() ends a batch, but train_batch is called "
                f"{self._calls_per_batch} times a batch: call "
                "context.disable_auto_grad_accumulation(), and train all micro-batches of a batch "
                "in one call of train_batch, with one engine.step() after them; or remove the key"
            )
        self._has_warned_of_no_step = False
        self.micro_batches_per_evaluation = self.micro_batches_per_batch if is_pipeline else 1
        partitions_weights = any(
            engine.zero_optimization_partition_weights() or engine.has_moe_layers
            for engine in context.models
        )
        splits_model = self.data_parallel_size < context.distributed.get_size()
        self.evaluates_in_lockstep = is_pipeline or partitions_weights or splits_model
        self.whole_models = [] if self.evaluates_in_lockstep else context.models
        check_modes(context.models)
        self.weight_copies = copies_of_modes(context.models)
        self.pads_evaluation = not is_pipeline
        self.takes_smaller_micro_batches = not any(
            isinstance(engine, PipelineEngine) and not engine.dynamic_shape
            for engine in context.models
        )
        self.evaluates_full_dataset = self._full_dataset_is_evaluated(
            "its engine's forward pass needs the other ranks (ZeRO stage 3, pipeline or model "
            "parallelism)"
            if self.evaluates_in_lockstep
            else None
        )
        self._evaluate_takes_index = accepts(trial.evaluate_batch, None, 0)

    def training_loader(self) -> Any:
        return _finite(super().training_loader())

    def validation_loader(self) -> Any:
        loader = _finite(super().validation_loader())
        return _SeparatePasses(loader) if isinstance(loader, DeepSpeedDataLoader) else loader

    def train_batch(
        self,
        micro_batches: Iterator[Any] | None,
        epoch_idx: int,
        batch_idx: int,
        collect: Callable[[Any], None],
    ) -> None:
        engine = self._context.models[0]
        before = _micro_batches_trained(engine)
        for _ in range(self._calls_per_batch):
            collect(self._trial.train_batch(micro_batches, epoch_idx, batch_idx))
        if not self._context.use_pipeline_parallel:
            self._check_micro_steps(_micro_batches_trained(engine) - before)

    def _check_micro_steps(self, micro_steps: int) -> None:
        """Check that the first engine ended its batch, as far as it was trained in this one."""
        if micro_steps % self.micro_batches_per_batch:
            advice = (
                "Each call must run the engine's forward, backward and step once; to accumulate by "
                "hand, call context.disable_auto_grad_accumulation()"
                if self._context.auto_grad_accumulation
                else "After context.disable_auto_grad_accumulation(), each call must take as many "
                "micro-batches, and run the engine's forward, backward and step for each of them; "
                "with managed_gradient_accumulation: false, one step after all of them"
            )
            raise TrialValueError(
                "DeepSpeed model engine did not train for gradient accumulation steps: "
                f"{self._calls_per_batch} call(s) of train_batch led to {micro_steps} "
                f"micro-step(s) of the first engine; expected {self.micro_batches_per_batch}, or a "
                f"multiple. {advice}"
            )
        if micro_steps == 0 and not self._has_warned_of_no_step:
            self._has_warned_of_no_step = True
            logger.warning(
                "train_batch made no step of the first engine in a whole batch; if that is not "
                "intended, call engine.backward(loss) and engine.step() in it"
            )

    def learning_rates(self) -> list[float | None]:
        return [next(map(float, engine.get_lr()), None) for engine in self._context.models]

    def scaled_steps(self) -> tuple[int, int]:
        models = self._context.models
        engines = [each for each in models if each.fp16_enabled() or each.torch_autocast_enabled()]
        steps = sum(int(engine.global_steps) for engine in engines)
        return steps, sum(int(engine.skipped_steps) for engine in engines)

    def measured_flops_per_sample(self) -> float:
        """The result of DeepSpeed's flops profiler on rank 0, once it has measured.

        The profiler counts the forward pass of a micro-batch on that rank. So the FLOPs stay
        unknown for a divided model, and with frozen weights or several models, whose backward pass
        is not twice that.
        """
        engines = self._context.models
        profiler = getattr(engines[0], "flops_profiler", None)
        forward_flops = getattr(profiler, "flops", 0)  # set once the profile is printed
        is_whole = self.data_parallel_size == self._context.distributed.get_size()
        if not forward_flops or len(engines) > 1 or not is_whole:
            return 0.0
        if not all(each.requires_grad for each in engines[0].module.parameters()):
            return 0.0
        return 3.0 * forward_flops / int(engines[0].train_micro_batch_size_per_gpu())

    def evaluate_batch(self, micro_batches: Iterator[Any] | None, batch_idx: int) -> Any:
        if self._evaluate_takes_index:
            return self._trial.evaluate_batch(micro_batches, batch_idx)
        return self._trial.evaluate_batch(micro_batches)  # type: ignore[call-arg]  # older form

    @property
    def schedulers(self) -> list[Any]:
        of_engines = (engine.lr_scheduler for engine in self._context.models)
        return [each for each in of_engines if each is not None]

    @property
    def named_modules(self) -> Sequence[torch.nn.Module]:
        return self.modules if self.whole_models else []

    def setting_parts(self) -> list[SettingsPart]:
        named = self.named_modules
        engines = _with_optimizer(self._context.models)
        optimizers = [EngineOptimizer(each, self.schedulers, named) for each in engines]
        return [*optimizers, *engine_parts(self._context.models, self.schedulers)]

    def set_training(self, training: bool) -> None:
        for engine in self._context.models:
            engine.train(training)

    def save(
        self, folder: Path, memory_files: MemoryFiles, reader: Reader, hook_state: Mapping[str, Any]
    ) -> None:
        engines = self._context.models
        for module in self.modules:  # a part may be compiled since
            name_as_uncompiled(module)
        to_training_mode(self.optimizers, self.weight_copies)  # a hook may have switched
        with (
            self._trained_as_built(),
            snapshot_checkpoint_engines(engines, folder, memory_files=memory_files, reader=reader),
        ):
            self._trial.save(self._context, folder)
        for i, engine in enumerate(engines):
            if dist.get_rank(group=engine.seq_data_parallel_group) == 0:
                tied = tied_layers(engine.module)
                write_facts(
                    engine.module,
                    folder / facts_folder(i),
                    self._context.tokenizer_files,
                    engine.checkpoint_mp_rank,
                    tied,
                    partial(layer_name, tied=tied),
                )

    def load(
        self, folder: Path, reader: Reader, hook_state: Mapping[str, Any], reshape: bool = False
    ) -> None:
        engines = self._context.models
        with ExitStack() as stack:
            stack.enter_context(self._trained_as_built())
            stack.enter_context(snapshot_checkpoint_engines(engines, folder, reader=reader))
            saved = read_parameters(folder / STATE_FOLDER)
            for engine, then in zip(_with_optimizer(engines), saved, strict=False):
                require_same_order(names_of_copied(engine, self.named_modules), then)
            stack.enter_context(states_by_name(self.optimizers, self.named_modules, saved))
            stack.enter_context(optimizers_loaded_in_place(self.optimizers))
            if reshape or self._is_converted(folder, reader):
                for i in range(len(engines)):
                    if not any((folder / f"model{i}").glob("*_model_states.pt")):
                        raise self._own_format_error("save")
                folder = stack.enter_context(resharded(engines, folder, reader.load_mapped))
            self._context.has_loaded_engines = False
            self._trial.load(self._context, folder)
        if reshape and not self._context.has_loaded_engines:
            raise self._own_format_error("load")

    @contextmanager
    def _trained_as_built(self) -> Iterator[None]:
        """Inside the block, parameters that the trial has frozen or thawed since are as built.

        DeepSpeed takes a parameter's present `requires_grad` to say whether its optimizer has it,
        and so where its weight is saved. But the optimizer has those that it was built with.
        """
        now = [each.requires_grad for each, _ in self._required_grad]
        try:
            for parameter, as_built in self._required_grad:
                parameter.requires_grad_(as_built)
            yield
        finally:
            for (parameter, _), present in zip(self._required_grad, now, strict=True):
                parameter.requires_grad_(present)

    def _own_format_error(self, method: str) -> CheckpointError:
        return CheckpointError(
            f"{type(self._trial).__name__}.{method} does not call super().{method}, so checkpoints "
            "cannot be resharded. Call it, and keep other files beside; or resume with as many "
            "slots, and the ZeRO stage, that saved the checkpoint; or load only the weights: "
            "searcher.source_weights_only=true"
        )

    def _is_converted(self, folder: Path, reader: Reader) -> bool:
        """True if a checkpoint of the present topology needs resharding nevertheless."""
        tags = [(each, folder / f"model{i}") for i, each in enumerate(self._context.models)]
        names = ((engine, [file.name for file in tag.glob("*")]) for engine, tag in tags)
        if any(is_of_other_precision(*each) for each in names):
            return True
        ordered = (is_ordered_otherwise(*each, reader.load_mapped) for each in tags)
        return self.loads_plainly and any(ordered)

    def load_weights(self, folder: Path, reader: Reader) -> None:
        with snapshot_checkpoint_engines(self._context.models, folder, reader=reader):
            self._trial.load_weights(self._context, folder)

    def files_read(
        self, files: list[FileEntry], saved_by: Topology, restore: Restore, ranks: Sequence[int]
    ) -> list[FileEntry]:
        engines, now = self._context.models, self.topology()
        if restore == "weights":
            if self._overrides("load_weights"):
                return files
            return files_for_load_weights(engines, files, ranks)
        if self.loads_plainly:
            return files_for_load(engines, files, saved_by, ranks, now)
        return files_for_ranks(files, saved_by, ranks, now, engines)

    def topology(self) -> Topology:
        first = self._context.models[0]
        world, data = self._context.distributed.get_size(), self.data_parallel_size
        pipeline = int(first.num_stages) if isinstance(first, PipelineEngine) else 1
        sequence = int(first.sequence_parallel_size)
        return Topology(
            world_size=world,
            data_parallel_size=data,
            pipeline_parallel_size=pipeline,
            model_parallel_size=max(1, world // (data * pipeline * sequence)),
            sequence_parallel_size=sequence,
            zero_stage=int(first.zero_optimization_stage()),
            batch_samples=self.batch_samples,
            micro_batch_samples=int(first.train_micro_batch_size_per_gpu()),
        )

    def destroy(self) -> None:
        """Destroy the engines, and free what DeepSpeed 0.19 would keep of them for ever.

        Warm ranks train one model after the other. `make bench NAME=rebuild` shows whether a
        release of DeepSpeed keeps more.
        """
        for engine in self._context.models:
            engine.destroy()
            if isinstance(engine, PipelineEngine):
                _forget_pipeline(engine)
        _forget_zero_3_models()
        # `engine.compile` switches it off in the whole process. Without it, torch cannot trace
        # DeepSpeed's hooks of some other engines, such as one of a compiled model with ZeRO 3.
        nvtx.enable_nvtx = True


class _SeparatePasses:
    """A `DeepSpeedDataLoader` whose passes do not disturb the passes of its other users.

    Its `__iter__` returns the loader itself. So a trial that trains and validates with one loader
    would continue to train on the validation's pass.
    """

    def __init__(self, loader: DeepSpeedDataLoader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        passing: Iterator[Any] = iter(copy.copy(self._loader))
        return passing


def _finite(loader: Any) -> Any:
    """The loader inside a `RepeatingLoader`: it ends, and has a length. Others are unchanged."""
    while isinstance(loader, RepeatingLoader):
        loader = loader.loader
    return loader


def _forget_zero_3_models() -> None:
    """Free the models of destroyed engines. No other engine may be in use.

    A module-level list of modules in their forward pass refers to them, and a cache of a method.
    Both are private; a release of DeepSpeed without them is served as well.
    """
    getattr(parameter_offload, "FWD_MODULE_STACK", []).clear()
    cached = "_PartitionedParameterCoordinator__params_to_release"
    method = getattr(PartitionedParameterCoordinator, cached, None)
    if inspect.isfunction(method):
        # The cache is inside a decorator that does not show it.
        for inner in inspect.getclosurevars(method).nonlocals.values():
            if hasattr(inner, "cache_clear"):
                inner.cache_clear()


def _forget_pipeline(engine: PipelineEngine) -> None:
    """Free a destroyed engine and its groups. Every rank calls this, engine by engine.

    Hooks of the last micro-batch's tensors refer to the engine, which refers to these tensors, and
    Python's garbage collector cannot see such hooks. The process groups of the module and of the
    grid, at least five, have threads and descriptors. Groups that a trial has created itself stay:
    its modules may keep them for its next engine.
    """
    engine.pipe_buffers.clear()
    engine.loss = None
    held = [*vars(engine.module).values(), *vars(engine.grid).values()]
    held += [tied["group"] for tied in engine.module.tied_comms.values()]
    for group in dict.fromkeys(each for each in held if isinstance(each, dist.ProcessGroup)):
        if group is not dist.group.WORLD:
            deepspeed.comm.destroy_process_group(group)
    if getattr(p2p, "_grid", None) is engine.grid:
        p2p._grid = None


def _with_optimizer(engines: Sequence[DeepSpeedEngine]) -> list[DeepSpeedEngine]:
    """The engines in which DeepSpeed has wrapped an optimizer."""
    return [each for each in engines if isinstance(each.basic_optimizer, torch.optim.Optimizer)]


def _is_managed(engine: DeepSpeedEngine) -> bool:
    """True if DeepSpeed decides which micro-batch ends a batch; else each ``step`` ends one."""
    return bool(config_of(engine).get("managed_gradient_accumulation", True))


def _micro_batches_trained(engine: DeepSpeedEngine) -> int:
    """How many micro-batches the engine was trained on; without the last ones, before a step."""
    if _is_managed(engine):
        return int(engine.micro_steps)
    micro_batches = int(engine.gradient_accumulation_steps())
    return int(engine.global_samples) * micro_batches // int(engine.train_batch_size())
