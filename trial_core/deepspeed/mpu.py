"""How a rank takes part in model parallelism: what the training loop needs to know of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepspeed.utils import groups

from trial_core.distributed import DistributedContext
from trial_core.errors import TrialError


@dataclass
class ModelParallelUnit:
    """A rank's part in the parallel layout. Follows Determined's class of the same name.

    Ranks that share a `data_parallel_rank` work on the same samples: they hold different parts of
    one copy of the model. They get the same shard of the data in the same order, and the same
    random seeds.

    Attributes:
        data_parallel_rank: which shard of the data this rank trains on.
        data_parallel_world_size: how many shards there are.
        should_report_metrics: whether this rank's metrics count, and what its reducers gather.
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


def forget_model_parallelism() -> None:
    """Make DeepSpeed forget the layout of engines that this process has built before.

    It keeps the ``mpu`` of the last pipeline or model-parallel engine for the whole process, and
    takes it for the layout of every engine built after.
    """
    groups.mpu = None


def check_mpu(mpu: ModelParallelUnit, distributed: DistributedContext) -> None:
    """Check that the units of all ranks fit together. Collective: every rank calls this.

    Raises:
        TrialError: on every rank alike, if they do not.
    """
    units: list[tuple[int, int, bool, bool]] = distributed.allgather(
        (
            mpu.data_parallel_rank,
            mpu.data_parallel_world_size,
            mpu.should_report_metrics,
            mpu.should_build_data_loader,
        )
    )
    sizes = {size for _, size, _, _ in units}
    shards = {shard for shard, _, _, _ in units}
    if len(sizes) > 1 or shards != set(range(max(sizes))):
        raise TrialError(
            "the ModelParallelUnits of the ranks do not fit together: every rank must give the "
            "same data_parallel_world_size n, and together they must give each data_parallel_rank "
            f"from 0 to n - 1; seen, rank by rank: {[f'{unit[0]} of {unit[1]}' for unit in units]}"
        )
    for what, column in (("should_report_metrics", 2), ("should_build_data_loader", 3)):
        missing = sorted(shards - {unit[0] for unit in units if unit[column]})
        if missing:
            raise TrialError(
                f"no rank with data_parallel_rank {missing[0]} has {what}=True in its "
                "ModelParallelUnit; at least one rank of every data-parallel rank must"
            )
