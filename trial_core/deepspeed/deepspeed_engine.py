"""A `DeepSpeedTrial` behind the controller's seam."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from trial_core.checkpoint.manifest import FileEntry, Topology
from trial_core.checkpoint.resume_point import Restore
from trial_core.controller.safe_load import Reader
from trial_core.deepspeed.accelerator import accelerator_rng_state, restore_accelerator_rng
from trial_core.deepspeed.checkpoint_classes import CHECKPOINT_CLASSES
from trial_core.deepspeed.context import DeepSpeedTrialContext
from trial_core.deepspeed.mpu import check_mpu
from trial_core.deepspeed.reshard.reshard import reshaped
from trial_core.deepspeed.restore_reads import read_by_load, read_by_load_weights
from trial_core.deepspeed.shard_files import shard_files
from trial_core.deepspeed.shard_selection import files_needed
from trial_core.deepspeed.trial import DeepSpeedTrial
from trial_core.errors import CheckpointError, TrialError
from trial_core.pytorch.callback import PyTorchCallback
from trial_core.pytorch.reducer import Reducer
from trial_core.transfer.memory_files import MemoryFiles

ZERO_STAGE_WEIGHTS = 3


class DeepSpeedTrialEngine:
    """Drives a `DeepSpeedTrial`; see `TrialEngine` for what each member means.

    Collective: every rank constructs one.

    Raises:
        TrialError: the trial wrapped no engine, its `ModelParallelUnit`s do not fit together, or it
            cannot be validated.
    """

    checkpoint_classes = CHECKPOINT_CLASSES

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
        self.callbacks: Mapping[str, PyTorchCallback] = trial.build_callbacks()
        self.reducers = context.reducers
        self.data_parallel_rank = context.mpu.data_parallel_rank
        self.data_parallel_size = context.mpu.data_parallel_world_size
        self.reports_metrics = context.mpu.should_report_metrics
        self.needs_data = context.mpu.should_build_data_loader
        self.micro_batches_per_batch = int(first.gradient_accumulation_steps())
        self.batch_samples = int(first.train_batch_size())
        self.requires_reproducible_loaders = context.reproducible_loaders
        in_groups = context.uses_pipeline
        self._calls_per_batch = (
            self.micro_batches_per_batch if context.auto_grad_accumulation and not in_groups else 1
        )
        self.micro_batches_per_evaluation = self.micro_batches_per_batch if in_groups else 1
        self.evaluates_in_lockstep = _needs_other_ranks(context)
        self.pads_evaluation = not in_groups
        self.evaluates_full_dataset = _validates_in_one_go(trial, self.evaluates_in_lockstep)
        self._evaluate_takes_index = _takes_two(trial.evaluate_batch)

    def training_loader(self) -> Any:
        return self._trial.build_training_data_loader()

    def validation_loader(self) -> Any:
        return self._trial.build_validation_data_loader()

    def train_batch(
        self, micro_batches: Iterator[Any] | None, epoch_idx: int, batch_idx: int
    ) -> list[Any]:
        engine = self._context.models[0]
        before = engine.global_steps
        metrics = [
            self._trial.train_batch(micro_batches, epoch_idx, batch_idx)
            for _ in range(self._calls_per_batch)
        ]
        if engine.global_steps != before + 1:
            raise TrialError(
                "DeepSpeed model engine did not train for gradient accumulation steps: "
                f"{self._calls_per_batch} call(s) of train_batch led to "
                f"{engine.global_steps - before} optimizer step(s) of the first engine, where one "
                "batch is exactly one. Each call must run the engine's forward, backward and step "
                "once; to accumulate by hand, call context.disable_auto_grad_accumulation(). With "
                "several engines, wrap one first that steps once a batch"
            )
        return metrics

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

    def accelerator_rng_state(self) -> Any:
        return accelerator_rng_state()

    def restore_accelerator_rng(self, state: Any) -> None:
        restore_accelerator_rng(state)

    def save(self, folder: Path, images: MemoryFiles) -> None:
        with shard_files(self._context.models, folder, images=images):
            self._trial.save(self._context, folder)

    def load(self, folder: Path, reader: Reader, reshape: bool = False) -> None:
        engines = self._context.models
        with shard_files(engines, folder, reader=reader), ExitStack() as reshaping:
            if reshape:
                _require_shards_alone(self._trial)
                folder = reshaping.enter_context(reshaped(engines, folder, reader.load_mapped))
            self._trial.load(self._context, folder)

    def load_weights(self, folder: Path, reader: Reader) -> None:
        with shard_files(self._context.models, folder, reader=reader):
            self._trial.load_weights(self._context, folder)

    def files_read(
        self, files: list[FileEntry], saved_by: Topology, restore: Restore, ranks: Sequence[int]
    ) -> list[FileEntry]:
        engines, now = self._context.models, self.topology()
        if restore == "weights":
            if _overrides(self._trial, "load_weights"):
                return files
            return read_by_load_weights(engines, files, ranks)
        if _overrides(self._trial, "load"):
            return files_needed(files, saved_by, ranks, now)
        return read_by_load(engines, files, saved_by, ranks, now)

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


def _require_shards_alone(trial: DeepSpeedTrial) -> None:
    """Check that what the trial has saved are shards of DeepSpeed's, and nothing but them."""
    own = [name for name in ("save", "load") if _overrides(trial, name)]
    if own:
        raise CheckpointError(
            f"{type(trial).__name__} overrides {' and '.join(own)}: how what it saves is shared "
            "out over other ranks is known to it alone. Resume with as many slots, and the ZeRO "
            "stage, that saved the checkpoint; or take its weights alone: "
            "searcher.source_weights_only=true"
        )


def _overrides(trial: DeepSpeedTrial, name: str) -> bool:
    return getattr(type(trial), name) is not getattr(DeepSpeedTrial, name)


def _needs_other_ranks(context: DeepSpeedTrialContext) -> bool:
    """Whether a rank cannot run a forward pass on its own: others hold a part of the weights."""
    shares_weights = any(
        engine.zero_optimization_stage() == ZERO_STAGE_WEIGHTS or engine.has_moe_layers
        for engine in context.models
    )
    splits_model = context.mpu.data_parallel_world_size < context.distributed.get_size()
    return context.uses_pipeline or shares_weights or splits_model


def _validates_in_one_go(trial: DeepSpeedTrial, needs_other_ranks: bool) -> bool:
    name, own = type(trial).__name__, type(trial)
    in_batches = own.evaluate_batch is not DeepSpeedTrial.evaluate_batch
    in_one_go = own.evaluate_full_dataset is not DeepSpeedTrial.evaluate_full_dataset
    if in_batches == in_one_go:
        defines = "both" if in_batches else "neither"
        raise TrialError(
            f"{name} defines {defines} of evaluate_batch and evaluate_full_dataset; define exactly "
            "one: evaluate_batch is called on every rank, evaluate_full_dataset on a single one"
        )
    if in_one_go and needs_other_ranks:
        raise TrialError(
            f"{name} defines evaluate_full_dataset, which runs on a single rank, but its engine's "
            "forward pass needs the other ranks (ZeRO stage 3, pipeline or model parallelism) and "
            "would wait for them for ever; define evaluate_batch instead"
        )
    return in_one_go


def _takes_two(evaluate_batch: Any) -> bool:
    """Whether `evaluate_batch` takes a batch_idx, whatever it is called."""
    try:
        inspect.signature(evaluate_batch).bind(None, 0)
    except TypeError:
        return False
    return True
