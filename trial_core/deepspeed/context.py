"""`DeepSpeedTrialContext`: what a `DeepSpeedTrial` asks and tells. Follows Determined's class."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, overload

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
from trial_core.distributed import SINGLE_RANK_ENVIRONMENT, DistributedContext, is_launched
from trial_core.errors import TrialError
from trial_core.pytorch.reducer import FunctionReducer, MetricReducer, ReducerRegistry, ReducerT
from trial_core.pytorch.to_device import to_device

logger = logging.getLogger(__name__)


class DeepSpeedTrialContext(TrialContext):
    """Passed to a `DeepSpeedTrial`'s ``__init__`` on every rank.

    Attributes:
        models: the wrapped engines, in the order of wrapping.
        device: what this rank trains on.
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
        self._odd_types: set[type] = set()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """A context for debugging a trial in a script or notebook of its own, outside any run::

            context = DeepSpeedTrialContext.from_config({"hyperparameters": {"lr": 1e-3}})
            trial = MyTrial(context)
            batches = iter(trial.build_training_data_loader())
            print(trial.train_batch(batches, epoch_idx=0, batch_idx=0))

        As `TrialContext.from_config`. In plain Python it also puts into the environment that there
        is a single rank, so that the trial's ``deepspeed.initialize`` finds what it looks for.
        """
        if not is_launched():
            os.environ.update(SINGLE_RANK_ENVIRONMENT)
        return super().from_config(config)

    def wrap_model_engine(self, model: DeepSpeedEngine) -> DeepSpeedEngine:
        """Register a DeepSpeed engine: it is saved, restored and counted from here on.

        The first one wrapped tells how many samples a batch has, and whether the trial is a
        pipeline: later pipelines must have its layout. Every rank calls this, in the same order.

        Raises:
            TrialError: `model` is no engine, or is wrapped already; or it is a pipeline, and the
                first engine is none or is laid out otherwise.
        """
        if not isinstance(model, DeepSpeedEngine):
            raise TrialError(
                f"wrap_model_engine takes the engine that deepspeed.initialize returns first, "
                f"got {type(model).__name__}"
            )
        if any(wrapped is model for wrapped in self.models):
            raise TrialError(
                "wrap_model_engine was called twice with the same engine; an engine that is "
                "wrapped is saved and restored, once is enough"
            )
        if self.models:
            self._check_later_engine(model)
        elif isinstance(model, PipelineEngine):
            self.uses_pipeline = True
            self.mpu = make_deepspeed_mpu(model.mpu)
        self.models.append(model)
        return model

    def set_mpu(self, mpu: ModelParallelUnit) -> None:
        """Use a custom model-parallel layout, that of the first wrapped engine.

        Raises:
            TrialError: `mpu` is no `ModelParallelUnit`; or this is called before any engine was
                wrapped, or a second time.
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
        """Call `train_batch` once a batch; it then trains on `train_batch_size` samples itself."""
        self.auto_grad_accumulation = False

    def disable_dataset_reproducibility_checks(self) -> None:
        """Allow data loaders other than `trial_core.pytorch.DataLoader`.

        Sharding and shuffling are then the trial's business. A training loader with ``state_dict``
        and ``load_state_dict``, such as torchdata's ``StatefulDataLoader``, is saved and restored
        with every checkpoint, on each rank; any other begins with its first micro-batch again
        after a restart, with a warning.
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
        """Register a metric that is computed from all ranks' values at once.

        Args:
            reducer: a function of the list of all values passed to ``update``, or a MetricReducer.
            name: the metric's name; None when the reducer returns a dict of metrics.
            for_training: report it with training workloads.
            for_validation: report it with validations.
        """
        return self.reducers.wrap(reducer, name, for_training, for_validation)

    def to_device(self, data: Any) -> Any:
        """`data` on this rank's device: tensors and arrays, also nested in dicts and sequences."""
        return to_device(data, self.device, self._odd_types)

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
        first = self.models[0].train_micro_batch_size_per_gpu()
        own = model.train_micro_batch_size_per_gpu()
        if own != first:
            logger.warning(
                "engine %d has a micro-batch size of %s, the first one has %s; batches and samples "
                "are counted by the first",
                len(self.models),
                own,
                first,
            )
