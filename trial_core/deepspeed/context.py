"""`DeepSpeedTrialContext`: a trial's interface to its run. Follows Determined's class."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from typing_extensions import Self

from trial_core.common.text_format import first_few, plural
from trial_core.common.unknown_names import SaysWhatToUse
from trial_core.deepspeed.auto_values import fill_auto_values, filled
from trial_core.deepspeed.config_check import check_engine_config, is_zero_3
from trial_core.deepspeed.ds_config import overwrite_deepspeed_config
from trial_core.deepspeed.mpu import ModelParallelUnit, make_data_parallel_mpu, make_engine_mpu
from trial_core.deepspeed.op_builds import prepare_op_builds
from trial_core.deepspeed.pretrained import (
    divide_no_more,
    divide_pretrained,
    end_of_loading,
    named_config,
)
from trial_core.errors import TrialError, TrialTypeError, TrialValueError
from trial_core.rank.collectives.distributed import DistributedContext, is_launched
from trial_core.rank.collectives.rendezvous import host_single_rank
from trial_core.rank.state_files.compiled_names import COMPILED, name_as_uncompiled
from trial_core.rank.trial.context import RunInfo
from trial_core.rank.trial.torch_context import TorchTrialContext

logger = logging.getLogger(__name__)


class DeepSpeedTrialContext(SaysWhatToUse, TorchTrialContext):
    """Passed to a `DeepSpeedTrial`'s ``__init__`` on every rank.

    Follows ``determined.pytorch.deepspeed.DeepSpeedTrialContext``.

    Attributes:
        models: the wrapped engines, in the order of wrapping.
        mpu: this rank's place in the parallel layout.
        use_pipeline_parallel: True if a pipeline is wrapped.
        has_loaded_engines: True if `DeepSpeedTrial.load` has run in the restore at hand.
    """

    def __init__(self, info: RunInfo, distributed: DistributedContext) -> None:
        super().__init__(info, distributed)
        self.models: list[DeepSpeedEngine] = []
        self.mpu: ModelParallelUnit = make_data_parallel_mpu(distributed)
        self.auto_grad_accumulation = True
        self.use_pipeline_parallel = False
        self.has_loaded_engines = False
        self._mpu_was_set = False
        fill_auto_values(self)
        self.set_deepspeed_config(named_config(self.get_hparams()))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """A context for debugging a trial in a script or notebook, outside any run::

            context = DeepSpeedTrialContext.from_config({"hyperparameters": {"lr": 1e-3}})
            trial = MyTrial(context)
            batches = iter(trial.build_training_data_loader())
            print(trial.train_batch(batches, epoch_idx=0, batch_idx=0))

        Works as `TrialContext.from_config`. Without a launcher it also sets the environment
        variables of a single rank, which ``deepspeed.initialize`` needs.
        """
        if not is_launched():
            os.environ.update(host_single_rank())
        prepare_op_builds()
        return super().from_config(config)

    def wrap_model_engine(self, model: DeepSpeedEngine) -> DeepSpeedEngine:
        """Register a DeepSpeed engine, so that checkpoints contain it, and return it.

        The first wrapped engine determines the number of samples in a batch, and the layout: which
        ranks load data and report metrics. Every rank calls this, in the same order.

        Raises:
            TrialTypeError: `model` is not an engine.
            TrialError: its config is refused, since its checkpoints could not be resumed.
        """
        if not isinstance(model, DeepSpeedEngine):
            raise TrialTypeError(
                f"wrap_model_engine takes the engine that deepspeed.initialize returns first, "
                f"got {type(model).__name__}"
            )
        if any(wrapped is model for wrapped in self.models):
            logger.warning("wrap_model_engine got the same engine twice; it is registered once")
            return model
        check_engine_config(model, warns=self.distributed.get_rank() == 0)
        _name_as_uncompiled(model)
        if self.models:
            self._warn_of_differences(model)
        self.use_pipeline_parallel |= isinstance(model, PipelineEngine)
        if not self.models:
            self.mpu = make_engine_mpu(model, self.distributed)
        self.models.append(model)
        if self._divides_pretrained is not None:
            end_of_loading()
        return model

    def set_deepspeed_config(self, config: str | Path | Mapping[str, Any] | None) -> None:
        """Tell transformers the DeepSpeed config, before it builds or loads a model.

        With a config of ZeRO-3, ``from_pretrained`` and ``from_config`` then divide each weight
        among the ranks as soon as it is made, so that no rank ever holds the whole model; others
        change nothing. Not needed where the hyperparameter ``deepspeed_config`` names the file, and
        ``overwrite_deepspeed_args`` its changed values. Every rank calls this, with the same
        config.

        Args:
            config: a config, or the path of its JSON file. None keeps models whole on each rank
                from now on, for a model without an engine, such as a teacher.

        Raises:
            TrialError: the file cannot be read; or the stage is 3, and transformers or accelerate
                is not installed.
        """
        divide_no_more()
        read = {} if config is None else overwrite_deepspeed_config(config, {})
        # A trial may complete the rest later.
        read, _, left = filled(read, self.get_hparams())
        for section in {key[0] for key in left}:
            del read[section]
        self._divides_pretrained = divide_pretrained(read) if is_zero_3(read) else None

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
        """Samples of one batch in all data-parallel shards.

        That is DeepSpeed's ``train_batch_size``, except with AutoTP: without an ``mpu`` DeepSpeed
        counts the samples once for each rank of a tensor-parallel group.
        """
        self._first_engine("get_global_batch_size")
        return self.get_per_slot_batch_size() * self.mpu.data_parallel_world_size

    def get_per_slot_batch_size(self) -> int:
        """Samples of one batch in one data-parallel shard, in all its micro-batches."""
        self._first_engine("get_per_slot_batch_size")
        return self.train_micro_batch_size_per_gpu * self.num_micro_batches_per_slot

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
        if make_engine_mpu(model, self.distributed) != make_engine_mpu(first, self.distributed):
            logger.warning(
                f"engine {number} has a parallel layout that differs from the first engine's, "
                "which decides which ranks load data and report metrics"
            )
        first_size = first.train_micro_batch_size_per_gpu()
        size = model.train_micro_batch_size_per_gpu()
        if size != first_size:
            logger.warning(
                f"engine {number} has a micro-batch size of {size}, the first one has "
                f"{first_size}; batches and samples are counted by the first"
            )


def _name_as_uncompiled(engine: DeepSpeedEngine) -> None:
    """Name an engine's parameters as if its model were not compiled, also in what it saves.

    Raises TrialError if DeepSpeed has removed parameters of a compiled module: ZeRO-3 replaces the
    dict of a module's own parameters, which torch then sets in the module that is compiled.
    """
    name_as_uncompiled(engine.module)
    present = set(engine.module.parameters())
    names = [name for each, name in engine.param_names.items() if each not in present]
    if lost := [name.replace(COMPILED, "") for name in names if COMPILED in name]:
        raise TrialError(
            f"DeepSpeed's ZeRO-3 has taken {plural(len(lost), 'parameter')} from modules that "
            f"torch.compile has wrapped: {first_few(lost)}. Compile with module.compile(...) or "
            "engine.compile(...), which wrap nothing"
        )
    # Its optimizer has the same dict, and has made a mapping by name of it.
    engine.param_names.update({each: name for name, each in engine.module.named_parameters()})
    if getattr(engine.optimizer, "_param_slice_mappings", None) is not None:
        engine.optimizer._param_slice_mappings = engine.optimizer._create_param_mapping()


@contextmanager
def micro_batches_of(samples: int | None) -> Iterator[None]:
    """Inside the block, engines are built with micro-batches of at most `samples` samples.

    0 means a whole batch of the rank; None means as configured. DeepSpeed has no call for it: once
    an engine is built, its optimizer counts the steps of accumulation itself. The first engine
    decides the size: `samples`, or the next smaller one that divides its batch, since a rank's
    batch has another size on another number of ranks. A batch of a later engine that cannot be
    divided so is a TrialError in the block.
    """
    if samples is None:
        yield
        return
    configure = DeepSpeedConfig._configure_train_batch_size
    of_first = 0

    def configure_otherwise(config: DeepSpeedConfig) -> None:
        nonlocal of_first
        configure(config)
        batch = config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps
        if samples and not of_first:
            of_first = next(size for size in range(samples, 0, -1) if batch % size == 0)
        wanted = of_first or batch
        if batch % wanted:
            raise TrialError(
                f"a batch of {batch} samples a rank cannot be divided into micro-batches of "
                f"{wanted}; give engines batches of the same size"
            )
        config.train_micro_batch_size_per_gpu = wanted
        config.gradient_accumulation_steps = batch // wanted

    DeepSpeedConfig._configure_train_batch_size = configure_otherwise
    try:
        yield
    finally:
        DeepSpeedConfig._configure_train_batch_size = configure
