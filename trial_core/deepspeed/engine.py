"""A `DeepSpeedTrial` behind the controller's seam."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trial_core.checkpoint.manifest import Topology
from trial_core.deepspeed.context import DeepSpeedTrialContext
from trial_core.deepspeed.trial import DeepSpeedTrial
from trial_core.errors import TrialError
from trial_core.pytorch.callback import PyTorchCallback
from trial_core.pytorch.reducer import Reducer

ZERO_STAGE_WEIGHTS = 3


class DeepSpeedTrialEngine:
    """Drives a `DeepSpeedTrial`; see `TrialEngine` for what each member means.

    Raises:
        TrialError: the trial wrapped no engine.
    """

    def __init__(self, trial: DeepSpeedTrial, context: DeepSpeedTrialContext) -> None:
        if not context.models:
            raise TrialError(
                f"{type(trial).__name__}.__init__ wrapped no engine; pass what "
                "deepspeed.initialize returns first to context.wrap_model_engine"
            )
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
        stages = [engine.zero_optimization_stage() for engine in context.models]
        self.evaluates_in_lockstep = context.uses_pipeline or ZERO_STAGE_WEIGHTS in stages
        self.requires_reproducible_loaders = context.reproducible_loaders
        self._calls_per_batch = (
            self.micro_batches_per_batch
            if context.auto_grad_accumulation and not context.uses_pipeline
            else 1
        )
        self._evaluate_takes_index = (
            "batch_idx" in inspect.signature(trial.evaluate_batch).parameters
        )

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
                "once; to accumulate by hand, call context.disable_auto_grad_accumulation()"
            )
        return metrics

    def evaluation_steps(self, micro_batches: int) -> int:
        return (
            micro_batches // self.micro_batches_per_batch
            if self._context.uses_pipeline
            else micro_batches
        )

    def evaluate_batch(self, micro_batches: Iterator[Any] | None, batch_idx: int) -> Any:
        if self._evaluate_takes_index:
            return self._trial.evaluate_batch(micro_batches, batch_idx)
        return self._trial.evaluate_batch(micro_batches)  # type: ignore[call-arg]  # older form

    def evaluation_reducer(self) -> Reducer | Mapping[str, Reducer]:
        return self._trial.evaluation_reducer()

    def set_training(self, training: bool) -> None:
        for engine in self._context.models:
            engine.train(training)

    def save(self, folder: Path) -> None:
        self._trial.save(self._context, folder)

    def load(self, folder: Path) -> None:
        self._trial.load(self._context, folder)

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
        )
