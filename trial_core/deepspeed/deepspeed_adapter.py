"""`DeepSpeedTrialAdapter`: the `TrialAdapter` of a `DeepSpeedTrial`."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from trial_core.accelerator import (
    accelerator_rng_state,
    has_accelerator,
    restore_accelerator_rng,
)
from trial_core.checkpoint.manifest import FileEntry, Topology
from trial_core.checkpoint.resume_point import Restore
from trial_core.controller.optimizer_load import optimizers_loaded_in_place
from trial_core.controller.safe_load import Reader
from trial_core.deepspeed.checkpoint_engine import (
    CHECKPOINT_CLASSES,
    saves_in_memory,
    snapshot_checkpoint_engines,
)
from trial_core.deepspeed.context import DeepSpeedTrialContext
from trial_core.deepspeed.data_loaders import finite, finite_and_separate
from trial_core.deepspeed.engine_cleanup import forget_pipeline, forget_zero_3_models
from trial_core.deepspeed.mpu import check_mpu
from trial_core.deepspeed.reshard.reshard_loader import resharded
from trial_core.deepspeed.restore_files import (
    files_for_load,
    files_for_load_weights,
    files_for_ranks,
)
from trial_core.deepspeed.trial import DeepSpeedTrial
from trial_core.errors import CheckpointError, TrialError
from trial_core.pytorch.callback import built_callbacks
from trial_core.pytorch.metric_reduction import Reducer
from trial_core.transfer.memory_files import MemoryFiles

logger = logging.getLogger(__name__)

ZERO_STAGE_WEIGHTS = 3


class DeepSpeedTrialAdapter:
    """Drives a `DeepSpeedTrial`; `TrialAdapter` documents the members.

    Collective: every rank constructs one.

    Raises:
        TrialError: the trial wrapped no engine, or the ranks' `ModelParallelUnit`s are
            inconsistent, or the trial cannot be validated.
    """

    checkpoint_classes = CHECKPOINT_CLASSES
    chief_hooks: frozenset[str] = frozenset()

    def __init__(self, trial: DeepSpeedTrial, context: DeepSpeedTrialContext) -> None:
        if not context.models:
            raise TrialError(
                f"{type(trial).__name__}.__init__ wrapped no engine; pass what "
                "deepspeed.initialize returns first to context.wrap_model_engine"
            )
        check_mpu(context.mpu, context.distributed)
        self._trial = trial
        self._context = context
        first = context.models[0]
        is_pipeline = context.uses_pipeline
        self.callbacks = built_callbacks(trial, context)
        self.reducers = context.reducers
        self.data_parallel_rank = context.mpu.data_parallel_rank
        self.data_parallel_size = context.mpu.data_parallel_world_size
        self.reports_metrics = context.mpu.should_report_metrics
        self.reports_training_metrics = self.reports_metrics
        self.needs_data = context.mpu.should_build_data_loader
        self.micro_batches_per_batch = int(first.gradient_accumulation_steps())
        self.batch_samples = int(first.train_batch_size())
        self.requires_reproducible_loaders = context.reproducible_loaders
        self._accumulates = context.auto_grad_accumulation and not is_pipeline
        self._calls_per_batch = self.micro_batches_per_batch if self._accumulates else 1
        self._has_warned_of_no_step = False
        self.micro_batches_per_evaluation = self.micro_batches_per_batch if is_pipeline else 1
        self.evaluates_in_lockstep = _forward_needs_other_ranks(context)
        self.whole_models: Sequence[Any] = [] if self.evaluates_in_lockstep else context.models
        self.pads_evaluation = not is_pipeline
        self.evaluates_full_dataset = _evaluates_full_dataset(trial, self.evaluates_in_lockstep)
        self._evaluate_takes_index = _accepts_batch_idx(trial.evaluate_batch)

    def training_loader(self) -> Any:
        return finite(self._trial.build_training_data_loader())

    def validation_loader(self) -> Any:
        return finite_and_separate(self._trial.build_validation_data_loader())

    def train_batch(
        self, micro_batches: Iterator[Any] | None, epoch_idx: int, batch_idx: int
    ) -> list[Any]:
        engine = self._context.models[0]
        before = int(engine.micro_steps)
        metrics = [
            self._trial.train_batch(micro_batches, epoch_idx, batch_idx)
            for _ in range(self._calls_per_batch)
        ]
        # Of two mistakes the controller reports the first one: a wrong return value.
        has_metrics = all(isinstance(each, (torch.Tensor, Mapping)) for each in metrics)
        if self._accumulates and (has_metrics or not self.reports_metrics):
            self._check_micro_steps(int(engine.micro_steps) - before)
        return metrics

    def _check_micro_steps(self, micro_steps: int) -> None:
        """Check that the first engine ended its batch, as far as it was trained in this one."""
        if micro_steps % self.micro_batches_per_batch:
            raise TrialError(
                "DeepSpeed model engine did not train for gradient accumulation steps: "
                f"{self._calls_per_batch} call(s) of train_batch led to {micro_steps} "
                f"micro-step(s) of the first engine; expected {self.micro_batches_per_batch}, or a "
                "multiple. Each call must run the engine's forward, backward and step once; to "
                "accumulate by hand, call context.disable_auto_grad_accumulation()"
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
        engines = [engine for engine in self._context.models if engine.fp16_enabled()]
        steps = sum(int(engine.global_steps) for engine in engines)
        return steps, sum(int(engine.skipped_steps) for engine in engines)

    def evaluate_batch(self, micro_batches: Iterator[Any] | None, batch_idx: int) -> Any:
        if self._evaluate_takes_index:
            return self._trial.evaluate_batch(micro_batches, batch_idx)
        return self._trial.evaluate_batch(micro_batches)  # type: ignore[call-arg]  # older form

    def evaluate_full_dataset(self, loader: Any) -> Any:
        return self._trial.evaluate_full_dataset(loader)

    def evaluation_reducer(self) -> Reducer | Mapping[str, Reducer]:
        return self._trial.evaluation_reducer()

    def set_training(self, training: bool) -> None:
        for engine in self._context.models:
            engine.train(training)

    def accelerator_rng_state(self) -> dict[str, Any]:
        return accelerator_rng_state()

    def restore_accelerator_rng(self, states: Mapping[str, Any]) -> None:
        restore_accelerator_rng(states)

    def hook_state(self) -> dict[str, Any]:
        return {}  # DeepSpeed writes its files itself

    def read_hook_state(self, folder: Path, reader: Reader) -> dict[str, Any]:
        return {}

    @property
    def rehearses_save(self) -> bool:
        return (
            has_accelerator()
            and not _overrides(self._trial, "save")
            and all(map(saves_in_memory, self._context.models))
        )

    def save(
        self,
        folder: Path,
        memory_files: MemoryFiles,
        reader: Reader,
        hook_state: Mapping[str, Any],
    ) -> None:
        engines = self._context.models
        with snapshot_checkpoint_engines(engines, folder, memory_files=memory_files, reader=reader):
            self._trial.save(self._context, folder)

    def load(
        self, folder: Path, reader: Reader, hook_state: Mapping[str, Any], reshape: bool = False
    ) -> None:
        engines = self._context.models
        with ExitStack() as stack:
            stack.enter_context(snapshot_checkpoint_engines(engines, folder, reader=reader))
            stack.enter_context(optimizers_loaded_in_place(_base_optimizers(engines)))
            if reshape:
                _require_default_format(self._trial)
                folder = stack.enter_context(resharded(engines, folder, reader.load_mapped))
            self._trial.load(self._context, folder)

    def load_weights(self, folder: Path, reader: Reader) -> None:
        with snapshot_checkpoint_engines(self._context.models, folder, reader=reader):
            self._trial.load_weights(self._context, folder)

    def files_read(
        self, files: list[FileEntry], saved_by: Topology, restore: Restore, ranks: Sequence[int]
    ) -> list[FileEntry]:
        engines, now = self._context.models, self.topology()
        if restore == "weights":
            if _overrides(self._trial, "load_weights"):
                return files
            return files_for_load_weights(engines, files, ranks)
        if _overrides(self._trial, "load"):
            return files_for_ranks(files, saved_by, ranks, now)
        return files_for_load(engines, files, saved_by, ranks, now)

    def topology(self) -> Topology:
        first = self._context.models[0]
        world, data = self._context.distributed.get_size(), self.data_parallel_size
        pipeline = int(getattr(first, "num_stages", 1)) if self._context.uses_pipeline else 1
        return Topology(
            world_size=world,
            data_parallel_size=data,
            pipeline_parallel_size=pipeline,
            model_parallel_size=max(1, world // (data * pipeline)),
            zero_stage=int(first.zero_optimization_stage()),
            batch_samples=self.batch_samples,
        )

    def destroy(self) -> None:
        for engine in self._context.models:
            engine.destroy()
            if isinstance(engine, PipelineEngine):
                forget_pipeline(engine)
        forget_zero_3_models()


def _base_optimizers(engines: Sequence[DeepSpeedEngine]) -> Iterator[torch.optim.Optimizer]:
    """The optimizers that DeepSpeed has wrapped."""
    for engine in engines:
        if isinstance(engine.basic_optimizer, torch.optim.Optimizer):
            yield engine.basic_optimizer


def _require_default_format(trial: DeepSpeedTrial) -> None:
    """Check that DeepSpeed alone saves and loads the trial."""
    own = [name for name in ("save", "load") if _overrides(trial, name)]
    if own:
        raise CheckpointError(
            f"{type(trial).__name__} overrides {' and '.join(own)}, so its checkpoints cannot be "
            "resharded. Resume with as many slots, and the ZeRO stage, that saved the checkpoint; "
            "or load only the weights: searcher.source_weights_only=true"
        )


def _overrides(trial: DeepSpeedTrial, name: str) -> bool:
    return getattr(type(trial), name) is not getattr(DeepSpeedTrial, name)


def _forward_needs_other_ranks(context: DeepSpeedTrialContext) -> bool:
    """Whether other ranks hold weights that a forward pass of this rank needs."""
    partitions_weights = any(
        engine.zero_optimization_stage() == ZERO_STAGE_WEIGHTS or engine.has_moe_layers
        for engine in context.models
    )
    splits_model = context.mpu.data_parallel_world_size < context.distributed.get_size()
    return context.uses_pipeline or partitions_weights or splits_model


def _evaluates_full_dataset(trial: DeepSpeedTrial, needs_other_ranks: bool) -> bool:
    """Whether the trial defines `evaluate_full_dataset`, not `evaluate_batch`."""
    name = type(trial).__name__
    in_batches = _overrides(trial, "evaluate_batch")
    in_one_call = _overrides(trial, "evaluate_full_dataset")
    if in_batches == in_one_call:
        defines = "both" if in_batches else "neither"
        raise TrialError(
            f"{name} defines {defines} of evaluate_batch and evaluate_full_dataset; define exactly "
            "one: evaluate_batch is called on every rank, evaluate_full_dataset on a single one"
        )
    if in_one_call and needs_other_ranks:
        raise TrialError(
            f"{name} defines evaluate_full_dataset, which runs on a single rank, but its engine's "
            "forward pass needs the other ranks (ZeRO stage 3, pipeline or model parallelism) and "
            "would wait for them forever; define evaluate_batch instead"
        )
    return in_one_call


def _accepts_batch_idx(evaluate_batch: Any) -> bool:
    """Whether `evaluate_batch` has a second parameter, of any name."""
    try:
        inspect.signature(evaluate_batch).bind(None, 0)
    except TypeError:
        return False
    return True
