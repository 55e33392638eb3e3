"""`DeepSpeedTrialContext`: what a `DeepSpeedTrial` asks and tells. Follows Determined's class."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from typing_extensions import Self

from trial_core.context import RunInfo, TrialContext
from trial_core.deepspeed.mpu import (
    ModelParallelUnit,
    make_data_parallel_mpu,
    make_deepspeed_mpu,
)
from trial_core.deepspeed.op_builds import prepare_op_builds
from trial_core.distributed import DistributedContext, is_launched
from trial_core.errors import TrialError
from trial_core.pytorch.custom_reducers import FunctionReducer, MetricReducer, ReducerRegistry
from trial_core.pytorch.to_device import to_device
from trial_core.rendezvous import host_single_rank

logger = logging.getLogger(__name__)

ReducerT = TypeVar("ReducerT", bound=MetricReducer)


class DeepSpeedTrialContext(TrialContext):
    """Passed to a `DeepSpeedTrial`'s ``__init__`` on every rank.

    Follows ``determined.pytorch.deepspeed.DeepSpeedTrialContext``.

    Attributes:
        models: the wrapped engines, in the order of wrapping.
        device: the device that this rank trains on.
        mpu: this rank's place in the parallel layout.
    """

    def __init__(self, info: RunInfo, distributed: DistributedContext) -> None:
        super().__init__(info, distributed)
        self.models: list[DeepSpeedEngine] = []
        self.device = torch.device(get_accelerator().current_device_name())
        self.reducers = ReducerRegistry()
        self.mpu: ModelParallelUnit = make_data_parallel_mpu(distributed)
        self.auto_grad_accumulation = True
        self.reproducible_loaders = True
        self.uses_pipeline = False
        self._mpu_was_set = False
        self._warned_types: set[type] = set()

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

    def disable_dataset_reproducibility_checks(self) -> None:
        """Allow data loaders other than `trial_core.pytorch.DataLoader`.

        The trial must then shard and shuffle the data itself. Checkpoints hold the state of a
        training loader with ``state_dict`` and ``load_state_dict``, such as torchdata's
        ``StatefulDataLoader``, for each rank. Any other loader starts from its first micro-batch
        when the run resumes, with a warning.
        """
        self.reproducible_loaders = False

    @overload
    def wrap_reducer(
        self,
        reducer: ReducerT,
        name: str | None = None,
        for_training: bool = True,
        for_validation: bool = True,
    ) -> ReducerT: ...

    @overload
    def wrap_reducer(
        self,
        reducer: Callable[[list[Any]], Any],
        name: str | None = None,
        for_training: bool = True,
        for_validation: bool = True,
    ) -> FunctionReducer: ...

    def wrap_reducer(
        self,
        reducer: Callable[[list[Any]], Any] | MetricReducer,
        name: str | None = None,
        for_training: bool = True,
        for_validation: bool = True,
    ) -> MetricReducer:
        """Register a metric that is computed from the values of all ranks.

        Every rank wraps the same reducers, in the same order.

        Args:
            reducer: a `MetricReducer`, or a function of the list of all values passed to
                ``update``.
            name: the metric's name; None if the reducer returns a dict of metrics.
            for_training: report the metric after training workloads.
            for_validation: report the metric after validations.

        Returns:
            The `MetricReducer`; for a function, an object with ``update(value)``.

        Raises:
            TrialError: `reducer` is neither, or was wrapped before, or is used for nothing.
        """
        return self.reducers.wrap(reducer, name, for_training, for_validation)

    def to_device(self, data: Any) -> Any:
        """`data` with all tensors and arrays on this rank's device, also in dicts and sequences."""
        return to_device(data, self.device, self._warned_types)

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
