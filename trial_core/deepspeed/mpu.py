"""`ModelParallelUnit`: a rank's place in the parallel layout."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from deepspeed.utils import groups

from trial_core.distributed import DistributedContext
from trial_core.errors import TrialError


@dataclass
class ModelParallelUnit:
    """A rank's place in the parallel layout. Follows Determined's class of the same name.

    Ranks with the same `data_parallel_rank` hold different parts of one copy of the model. They get
    the same samples in the same order, and the same random seeds.

    Attributes:
        data_parallel_rank: index of the data shard that this rank trains on.
        data_parallel_world_size: number of data shards.
        should_report_metrics: whether this rank's metrics and reducer values count.
        should_build_data_loader: whether this rank needs data.
    """

    data_parallel_rank: int
    data_parallel_world_size: int
    should_report_metrics: bool
    should_build_data_loader: bool


def make_data_parallel_mpu(distributed: DistributedContext) -> ModelParallelUnit:
    """The unit for data parallelism alone: every rank has a shard and reports metrics."""
    return ModelParallelUnit(
        data_parallel_rank=distributed.get_rank(),
        data_parallel_world_size=distributed.get_size(),
        should_report_metrics=True,
        should_build_data_loader=True,
    )


def make_deepspeed_mpu(mpu: Any) -> ModelParallelUnit:
    """The unit of a `PipelineEngine`.

    The first and the last stage read data (inputs and labels). The last stage reports metrics: what
    other stages, rank 0 among them, add to custom reducers is left out.

    Args:
        mpu: the engine's grid, ``engine.mpu``.
    """
    stage, last = mpu.get_pipe_parallel_rank(), mpu.get_pipe_parallel_world_size() - 1
    is_first_in_slice = mpu.get_slice_parallel_rank() == 0
    return ModelParallelUnit(
        data_parallel_rank=mpu.get_data_parallel_rank(),
        data_parallel_world_size=mpu.get_data_parallel_world_size(),
        should_report_metrics=stage == last and is_first_in_slice,
        should_build_data_loader=stage in (0, last),
    )


def forget_model_parallelism() -> None:
    """Reset the process-wide layout that DeepSpeed keeps of the engines built before.

    DeepSpeed would use the ``mpu`` of the last pipeline or model-parallel engine for all engines
    that this process builds later.
    """
    groups.mpu = None


def check_mpu(mpu: ModelParallelUnit, distributed: DistributedContext) -> None:
    """Check that the units of all ranks are consistent. Collective: every rank calls this.

    Raises:
        TrialError: on every rank, if they are not.
    """
    own = [getattr(mpu, field.name) for field in fields(ModelParallelUnit)]
    units = [ModelParallelUnit(*unit) for unit in distributed.allgather(own)]
    sizes = {unit.data_parallel_world_size for unit in units}
    shards = {unit.data_parallel_rank for unit in units}
    if len(sizes) > 1 or shards != set(range(max(sizes))):
        seen = [f"{unit.data_parallel_rank} of {unit.data_parallel_world_size}" for unit in units]
        raise TrialError(
            "the ModelParallelUnits of the ranks do not fit together: every rank must give the "
            "same data_parallel_world_size n, and together they must give each data_parallel_rank "
            f"from 0 to n - 1; seen, rank by rank: {seen}"
        )
    for flag in ("should_report_metrics", "should_build_data_loader"):
        if not any(getattr(unit, flag) for unit in units):
            raise TrialError(
                f"no rank has {flag}=True in its ModelParallelUnit; at least one rank must"
            )
