"""`DeepSpeedTrialContext`: what a `DeepSpeedTrial` asks and tells. Follows Determined's class."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from typing_extensions import Self

from trial_core.context import RunInfo
from trial_core.deepspeed.mpu import (
    ModelParallelUnit,
    make_data_parallel_mpu,
    make_deepspeed_mpu,
)
from trial_core.deepspeed.op_builds import prepare_op_builds
from trial_core.distributed import DistributedContext, is_launched
from trial_core.errors import TrialError, TrialTypeError, TrialValueError
from trial_core.pytorch.torch_context import TorchTrialContext
from trial_core.rendezvous import host_single_rank
from trial_core.unknown_names import SaysWhatToUse

logger = logging.getLogger(__name__)


class DeepSpeedTrialContext(SaysWhatToUse, TorchTrialContext):
    """Passed to a `DeepSpeedTrial`'s ``__init__`` on every rank.

    Follows ``determined.pytorch.deepspeed.DeepSpeedTrialContext``.

    Attributes:
        models: the wrapped engines, in the order of wrapping.
        mpu: this rank's place in the parallel layout.
    """

    def __init__(self, info: RunInfo, distributed: DistributedContext) -> None:
        super().__init__(info, distributed)
        self.models: list[DeepSpeedEngine] = []
        self.mpu: ModelParallelUnit = make_data_parallel_mpu(distributed)
        self.auto_grad_accumulation = True
        self.uses_pipeline = False
        self._mpu_was_set = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """A context for debugging a trial in a script or notebook, outside any run::

            context = DeepSpeedTrialContext.from_config({"hyperparameters": {"lr": 1e-3}})
            trial = MyTrial(context)
            batches = iter(trial.build_training_data_loader())
            print(trial.train_batch(batches, epoch_idx=0, batch_idx=0))

        As `TrialContext.from_config`. Without a launcher it also sets the environment variables of
        a single rank, which ``deepspeed.initialize`` needs.
        """
        if not is_launched():
            os.environ.update(host_single_rank())
        prepare_op_builds(DistributedContext.from_environment().get_local_rank())
        return super().from_config(config)

    def wrap_model_engine(self, model: DeepSpeedEngine) -> DeepSpeedEngine:
        """Register a DeepSpeed engine, so that checkpoints contain it.

        The first wrapped engine determines the number of samples in a batch, and the layout: which
        ranks load data and report metrics. Every rank calls this, in the same order.

        Returns:
            `model`.

        Raises:
            TrialTypeError: `model` is not an engine.
        """
        if not isinstance(model, DeepSpeedEngine):
            raise TrialTypeError(
                f"wrap_model_engine takes the engine that deepspeed.initialize returns first, "
                f"got {type(model).__name__}"
            )
        if any(wrapped is model for wrapped in self.models):
            logger.warning("wrap_model_engine got the same engine twice; it is registered once")
            return model
        if self.models:
            self._warn_of_differences(model)
        if isinstance(model, PipelineEngine):
            self.uses_pipeline = True
            if not self.models:
                self.mpu = make_deepspeed_mpu(model.mpu)
        self.models.append(model)
        return model

    def set_mpu(self, mpu: ModelParallelUnit) -> None:
        """Use a custom model-parallel layout. Every rank calls this, with its own unit.

        Args:
            mpu: a `ModelParallelUnit`, or another object with its attributes.

        Raises:
            TrialTypeError: `mpu` lacks an attribute.
            TrialError: no engine is wrapped yet; or a unit was set before.
        """
        missing = [each.name for each in fields(ModelParallelUnit) if not hasattr(mpu, each.name)]
        if missing:
            raise TrialTypeError(
                f"set_mpu takes a trial_core.deepspeed.ModelParallelUnit, got {type(mpu).__name__} "
                f"without {', '.join(missing)}"
            )
        if not self.models:
            raise TrialError("set_mpu was called before wrap_model_engine; wrap the engine first")
        if self._mpu_was_set:
            raise TrialError("set_mpu was called twice; a trial has one ModelParallelUnit")
        self.mpu = mpu
        self._mpu_was_set = True

    # ------------------------------------------------------ batch sizes, of the first engine

    @property
    def use_pipeline_parallel(self) -> bool:
        """Whether a pipeline is wrapped."""
        return self.uses_pipeline

    @property
    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one micro-batch on one rank."""
        return int(
            self._first_engine("train_micro_batch_size_per_gpu").train_micro_batch_size_per_gpu()
        )

    _train_micro_batch_size_per_gpu = train_micro_batch_size_per_gpu
    """Determined's example `dcgan` reads it by this name."""

    @property
    def num_micro_batches_per_slot(self) -> int:
        """Micro-batches of one batch on one rank."""
        return int(self._first_engine("num_micro_batches_per_slot").gradient_accumulation_steps())

    def get_train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one micro-batch on one rank."""
        return self.train_micro_batch_size_per_gpu

    def get_num_micro_batches_per_slot(self) -> int:
        """Micro-batches of one batch on one rank."""
        return self.num_micro_batches_per_slot

    def get_global_batch_size(self) -> int:
        """Samples of one batch on all ranks: DeepSpeed's ``train_batch_size``."""
        return int(self._first_engine("get_global_batch_size").train_batch_size())

    def get_per_slot_batch_size(self) -> int:
        """Samples of one batch in one data-parallel shard, in all its micro-batches."""
        return self.get_global_batch_size() // self.mpu.data_parallel_world_size

    def disable_auto_grad_accumulation(self) -> None:
        """Call `train_batch` once a batch; the trial then trains all its micro-batches itself.

        A batch that is not a multiple of the first engine's accumulation steps ends the run.
        """
        self.auto_grad_accumulation = False

    def _first_engine(self, asked_for: str) -> DeepSpeedEngine:
        if not self.models:
            raise TrialValueError(
                f"context.{asked_for} is the first engine's; call wrap_model_engine before"
            )
        return self.models[0]

    def _warn_of_differences(self, model: DeepSpeedEngine) -> None:
        number, first = len(self.models), self.models[0]
        if isinstance(model, PipelineEngine):
            unit = make_deepspeed_mpu(first.mpu) if isinstance(first, PipelineEngine) else None
            if make_deepspeed_mpu(model.mpu) != unit:
                logger.warning(
                    "engine %d is a pipeline whose layout differs from the first engine's, which "
                    "decides which ranks load data and report metrics",
                    number,
                )
        first_size = first.train_micro_batch_size_per_gpu()
        size = model.train_micro_batch_size_per_gpu()
        if size != first_size:
            logger.warning(
                "engine %d has a micro-batch size of %s, the first one has %s; batches and samples "
                "are counted by the first",
                number,
                size,
                first_size,
            )
