"""`ModelParallelUnit`: a rank's place in the parallel layout."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.tensor_parallel import init_utils
from deepspeed.utils import groups

from trial_core.errors import TrialError
from trial_core.rank.collectives.distributed import DistributedContext


@dataclass
class ModelParallelUnit:
    """A rank's place in the parallel layout. Follows Determined's class.

    Ranks with the same `data_parallel_rank` hold different parts of one copy of the model. They get
    the same samples in the same order, and the same random seeds.

    Attributes:
        data_parallel_rank: index of the data shard that this rank trains on.
        data_parallel_world_size: number of data shards.
        should_report_metrics: True if this rank's metrics and reducer values count.
        should_build_data_loader: True if this rank needs data.
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


def make_engine_mpu(engine: DeepSpeedEngine, distributed: DistributedContext) -> ModelParallelUnit:
    """The unit of an engine: a pipeline, AutoTP, another ``mpu``, Ulysses, or data parallelism.

    The ranks of a tensor- or sequence-parallel group get the same samples, and the first of them
    reports metrics.
    """
    grid, sequences = engine.mpu, int(engine.sequence_parallel_size)
    if isinstance(engine, PipelineEngine):
        return make_deepspeed_mpu(grid)
    sequence_part = dist.get_rank(engine.seq_parallel_group) if sequences > 1 else 0
    if hasattr(grid, "get_data_parallel_rank"):
        copy, copies = grid.get_data_parallel_rank(), grid.get_data_parallel_world_size()
    else:  # DeepSpeed's own sequence groups are of neighbours
        copy, copies = distributed.get_rank() // sequences, distributed.get_size() // sequences
    return ModelParallelUnit(
        data_parallel_rank=copy,
        data_parallel_world_size=copies,
        should_report_metrics=engine.checkpoint_mp_rank == 0 and sequence_part == 0,
        should_build_data_loader=True,
    )


def make_deepspeed_mpu(mpu: Any) -> ModelParallelUnit:
    """The unit of a `PipelineEngine`.

    The first and the last stage read data (inputs and labels). The last stage reports metrics:
    values that other stages, rank 0 among them, add to custom reducers are left out.

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
    """Reset the process-wide layout that DeepSpeed keeps from engines built before.

    DeepSpeed would use the ``mpu`` and the mesh of the last engine with model parallelism for all
    engines that this process builds later. Its own groups are destroyed: every rank calls this.
    """
    groups.mpu = groups.mesh_device = init_utils._TP_MODEL_INIT_ARGS = None
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    kept = (groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_DATA_PARALLEL_GROUP)
    found = [group for by_size in kept for group in by_size.values()]
    found += [
        groups._TENSOR_MODEL_PARALLEL_GROUP,
        groups._DATA_PARALLEL_GROUP,
        parallel_state_sp._SEQUENCE_PARALLEL_GROUP,
        parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP,
    ]
    ranks = (groups._EXPERT_PARALLEL_GROUP_RANKS, groups._EXPERT_DATA_PARALLEL_GROUP_RANKS)
    for by_size in (*kept, *ranks):
        by_size.clear()
    groups._TENSOR_MODEL_PARALLEL_GROUP = groups._MODEL_PARALLEL_GROUP = None
    groups._DATA_PARALLEL_GROUP = None
    parallel_state_sp._release_sequence_parallel_groups()
    for group in dict.fromkeys(found):
        if group not in (None, dist.group.WORLD):
            deepspeed.comm.destroy_process_group(group)


def check_mpu(mpu: ModelParallelUnit, distributed: DistributedContext) -> None:
    """Check that the units of all ranks are consistent. Collective: every rank calls this.

    Raises TrialError on every rank if they are not.
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
