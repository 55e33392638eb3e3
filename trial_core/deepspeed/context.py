"""`DeepSpeedTrialContext`: what a `DeepSpeedTrial` asks and tells. Follows Determined's class."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
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
from trial_core.errors import TrialError
from trial_core.pytorch.torch_context import TorchTrialContext
from trial_core.rendezvous import host_single_rank

logger = logging.getLogger(__name__)


class DeepSpeedTrialContext(TorchTrialContext):
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

        The first wrapped engine determines the number of samples in a batch, and whether the trial
        is a pipeline. Every rank calls this, in the same order.

        Returns:
            `model`.

        Raises:
            TrialError: `model` is not an engine, or is wrapped already; or it is a pipeline whose
                layout differs from the first engine's.
        """
        if not isinstance(model, DeepSpeedEngine):
            raise TrialError(
                f"wrap_model_engine takes the engine that deepspeed.initialize returns first, "
                f"got {type(model).__name__}"
            )
        if any(wrapped is model for wrapped in self.models):
            raise TrialError(
                "wrap_model_engine was called twice with the same engine; wrap each engine once"
            )
        if self.models:
            self._check_later_engine(model)
        elif isinstance(model, PipelineEngine):
            self.uses_pipeline = True
            self.mpu = make_deepspeed_mpu(model.mpu)
        self.models.append(model)
        return model

    def set_mpu(self, mpu: ModelParallelUnit) -> None:
        """Use a custom model-parallel layout. Every rank calls this, with its own unit.

        Raises:
            TrialError: `mpu` is not a `ModelParallelUnit`; or no engine is wrapped yet; or a unit
                was set before.
        """
        if not isinstance(mpu, ModelParallelUnit):
            raise TrialError(
                f"set_mpu takes a trial_core.deepspeed.ModelParallelUnit, got {type(mpu).__name__}"
            )
        if not self.models:
            raise TrialError("set_mpu was called before wrap_model_engine; wrap the engine first")
        if self._mpu_was_set:
            raise TrialError("set_mpu was called twice; a trial has one ModelParallelUnit")
        self.mpu = mpu
        self._mpu_was_set = True

    def disable_auto_grad_accumulation(self) -> None:
        """Call `train_batch` once a batch; the trial then trains all its micro-batches itself."""
        self.auto_grad_accumulation = False

    def _check_later_engine(self, model: DeepSpeedEngine) -> None:
        if isinstance(model, PipelineEngine):
            first_unit = make_deepspeed_mpu(self.models[0].mpu) if self.uses_pipeline else None
            if make_deepspeed_mpu(model.mpu) != first_unit:
                raise TrialError(
                    f"wrap_model_engine got a PipelineEngine as engine {len(self.models)}, after "
                    f"one that {'has other stages' if self.uses_pipeline else 'is no pipeline'}: "
                    "the first engine's layout is the whole trial's. Wrap the pipeline first, and "
                    "give all pipelines of a trial the same stages"
                )
        first_size = self.models[0].train_micro_batch_size_per_gpu()
        size = model.train_micro_batch_size_per_gpu()
        if size != first_size:
            logger.warning(
                "engine %d has a micro-batch size of %s, the first one has %s; batches and samples "
                "are counted by the first",
                len(self.models),
                size,
                first_size,
            )
