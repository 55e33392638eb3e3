"""How a rank takes part in model parallelism: what the training loop needs to know of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trial_core.distributed import DistributedContext


@dataclass
class ModelParallelUnit:
    """A rank's part in the parallel layout. Follows Determined's class of the same name.

    Attributes:
        data_parallel_rank: which shard of the data this rank trains on.
        data_parallel_world_size: how many shards there are.
        should_report_metrics: whether this rank's metrics count.
        should_build_data_loader: whether this rank needs data at all.
    """

    data_parallel_rank: int
    data_parallel_world_size: int
    should_report_metrics: bool
    should_build_data_loader: bool


def make_data_parallel_mpu(distributed: DistributedContext) -> ModelParallelUnit:
    """The unit of plain data parallelism: every rank has a shard and reports."""
    return ModelParallelUnit(
        data_parallel_rank=distributed.get_rank(),
        data_parallel_world_size=distributed.get_size(),
        should_report_metrics=True,
        should_build_data_loader=True,
    )


def make_deepspeed_mpu(mpu: Any) -> ModelParallelUnit:
    """The unit of a `PipelineEngine`, from the grid that DeepSpeed keeps as ``engine.mpu``.

    The first and the last stage read data (inputs and labels); the last knows the loss.
    """
    stage, last = mpu.get_pipe_parallel_rank(), mpu.get_pipe_parallel_world_size() - 1
    first_in_slice = mpu.get_slice_parallel_rank() == 0
    return ModelParallelUnit(
        data_parallel_rank=mpu.get_data_parallel_rank(),
        data_parallel_world_size=mpu.get_data_parallel_world_size(),
        should_report_metrics=stage == last and first_in_slice,
        should_build_data_loader=stage in (0, last),
    )
