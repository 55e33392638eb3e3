"""The state that the live engine of this rank expects, filled with values from a checkpoint.

Each function returns a part of what DeepSpeed would have saved on this rank with the present
topology.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import is_optimized_parameter
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from trial_core.deepspeed.reshard.parameter_state import (
    MASTER,
    MUON_MOMENTUM,
    ParameterState,
    Partitions,
    zero3_part_elements,
    zero_keys,
)
from trial_core.deepspeed.reshard.saved_state import SourceEngine
from trial_core.errors import CheckpointError

ZERO_OPTIMIZERS = (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3, BF16_Optimizer)
"""DeepSpeed's classes whose state can be resharded."""


def check_engine(engine: DeepSpeedEngine) -> None:
    """Check that an engine's state can be resharded. Raises CheckpointError, which says why not."""
    unsupported = None
    if engine.has_moe_layers and _divides_experts(engine):
        unsupported = "experts that the ranks divide (ep_size > 1, or AutoEP)"
    elif engine.zero_optimization() and type(engine.optimizer) not in ZERO_OPTIMIZERS:
        unsupported = f"DeepSpeed's {type(engine.optimizer).__name__}"
    if unsupported is not None:
        raise CheckpointError(
            f"an engine with {unsupported} resumes only with as many ranks, the ZeRO stage and the "
            "precision (bf16 or not) that saved the checkpoint; use those, or load only the "
            "weights: searcher.source_weights_only=true"
        )


def shapes_by_group(engine: DeepSpeedEngine) -> list[dict[str, torch.Size]]:
    """The shapes of the trained parameters, by optimizer group.

    Raises CheckpointError if DeepSpeed wraps the optimizer in a way that cannot be resharded.
    """
    optimizer = engine.optimizer
    groups: list[list[Any]]
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        groups = [[] for _ in optimizer.param_groups]
        for sub_group, parameters in enumerate(optimizer.fp16_groups):
            groups[optimizer.sub_group_to_group_id[sub_group]] += parameters
    elif isinstance(optimizer, BF16_Optimizer):
        groups = optimizer.bf16_groups
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        groups = optimizer.bit16_groups
    elif isinstance(optimizer, torch.optim.Optimizer):
        groups = [
            [each for each in group["params"] if is_optimized_parameter(each)]
            for group in optimizer.param_groups
        ]
    else:
        raise CheckpointError(
            "an engine without ZeRO, in 16 bits, resumes only from a checkpoint that was saved "
            "without ZeRO; use ZeRO stage 1, or load only the weights: "
            "searcher.source_weights_only=true"
        )
    return [
        {engine.param_names[each]: getattr(each, "ds_shape", each.shape) for each in group}
        for group in groups
    ]


def module_state(engine: DeepSpeedEngine, source: SourceEngine) -> dict[str, Any] | None:
    """The module's state dict; None for a pipeline, which saves its layers in other files.

    Under ZeRO-3 each weight is an empty placeholder.
    """
    if source.model["module"] is None:
        return None
    partitioned = {
        name
        for name, parameter in engine.module.named_parameters(remove_duplicate=False)
        if hasattr(parameter, "ds_id")
    }
    return {
        name: torch.empty(0, dtype=saved.dtype) if name in partitioned else source.full_entry(name)
        for name, saved in source.model["module"].items()
    }


def frozen_fragments(engine: DeepSpeedEngine, source: SourceEngine) -> dict[str, torch.Tensor]:
    """This rank's ZeRO-3 parts of the frozen parameters; one that was not saved keeps its value.

    Raises CheckpointError if DeepSpeed keeps one in an unknown layout.
    """
    rank, ranks = _data_parallel_place(engine)
    fragments = {}
    for parameter in engine.module.parameters():
        if is_optimized_parameter(parameter):
            continue
        name = engine.param_names[parameter]
        fragment = parameter.ds_tensor.detach()
        if name in source.model["module"]:
            part = zero3_part_elements(parameter.ds_numel, ranks)
            if fragment.numel() != part or not fragment.is_floating_point():
                raise CheckpointError(
                    f"this rank holds {fragment.numel()} elements of {fragment.dtype} of the "
                    f"frozen parameter {name}; expected {part} floats; resume with as many ranks "
                    "and the ZeRO stage that saved the checkpoint"
                )
            values = source.full_entry(name).flatten()[rank * part : (rank + 1) * part]
            fragment = torch.zeros(part, dtype=values.dtype)
            fragment[: values.numel()] = values
        fragments[name] = fragment
    return fragments


def zero_optimizer_state(
    engine: DeepSpeedEngine, live_state: Mapping[str, Any], source: SourceEngine
) -> dict[str, Any]:
    """This rank's partitions of fp32 weights and optimizer state, under ZeRO's keys.

    The tensors are the optimizer's own where possible, so that the state never exists twice: when
    DeepSpeed loads a tensor into itself, nothing is copied.
    """
    flat_partitions, is_zero3 = _flat_partitions(engine.optimizer)
    masters_key, base_optimizer_key = zero_keys(is_zero3)
    rank, ranks = _data_parallel_place(engine)
    paddings = live_state.get("param_alignment_paddings")
    partitions = Partitions(engine._get_zero_param_shapes(), paddings, ranks, is_zero3)
    masters, state = [], {}
    for buffer, flat in enumerate(flat_partitions):
        parameters = [source.parameters[name] for name in partitions.buffers[buffer]]
        # Without ZeRO, a parameter that never had a gradient has no such state.
        dtypes = {key: dtype for each in parameters for key, dtype in each.dtypes.items()}
        filled = {
            key: _own_zeros(engine.optimizer, flat, key, dtype) for key, dtype in dtypes.items()
        }
        fragments = partitions.fragments(buffer, rank, flat.numel())
        for fragment in fragments:
            for key, tensor in filled.items():
                target = tensor[fragment.offset : fragment.offset + fragment.count]
                source.parameters[fragment.name].copy(key, fragment.first, target)
        if fragments and MUON_MOMENTUM in filled and _keeps_whole_momentum(engine, buffer):
            whole = [source.parameters[each.name].full_tensor(MUON_MOMENTUM) for each in fragments]
            filled[MUON_MOMENTUM] = torch.cat([each.flatten() for each in whole])
        masters.append(filled.pop(MASTER))
        state[buffer] = {**filled, **_common_scalars(parameters)}
    base_optimizer = {
        "state": {buffer: each for buffer, each in state.items() if each},
        "param_groups": _groups(source, live_state[base_optimizer_key]["param_groups"]),
    }
    return {masters_key: masters, base_optimizer_key: base_optimizer}


def full_optimizer_state(engine: DeepSpeedEngine, source: SourceEngine) -> dict[str, Any]:
    """The state dict of an optimizer without ZeRO."""
    live_groups = engine.optimizer.state_dict()["param_groups"]
    state: dict[int, dict[str, Any]] = {}
    for group, live_group in zip(engine.optimizer.param_groups, live_groups, strict=True):
        for live, index in zip(group["params"], live_group["params"], strict=True):
            if is_optimized_parameter(live):
                parameter = source.parameters[engine.param_names[live]]
                tensors = {k: parameter.full_tensor(k) for k in parameter.dtypes if k != MASTER}
                if tensors or parameter.scalars:
                    state[index] = {**tensors, **copy.deepcopy(parameter.scalars)}
    return {"state": state, "param_groups": _groups(source, live_groups)}


# --------------------------------------------------------------------------------- internals


def _divides_experts(engine: DeepSpeedEngine) -> bool:
    """True if ranks have different experts. With an ep_size of 1 each rank has all of them."""
    layers = [each for each in engine.module.modules() if isinstance(each, MoE)]
    return not layers or any(layer.ep_size > 1 for layer in layers)


def _data_parallel_place(engine: DeepSpeedEngine) -> tuple[int, int]:
    """This rank's index among the ranks that share the optimizer's state, and their number."""
    group = engine.optimizer.dp_process_group
    return dist.get_rank(group=group), dist.get_world_size(group=group)


def _keeps_whole_momentum(engine: DeepSpeedEngine, buffer: int) -> bool:
    """True if this rank holds Muon's momentum of whole parameters: see `MUON_MOMENTUM`."""
    optimizer = engine.optimizer
    return (
        isinstance(optimizer, DeepSpeedZeroOptimizer)
        and bool(optimizer.param_groups[buffer].get("use_muon"))
        and not optimizer.cpu_offload
    )


def _flat_partitions(optimizer: Any) -> tuple[list[torch.Tensor], bool]:
    """This rank's partitions of the fp32 weights, and whether they are ZeRO-3's."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return optimizer.fp32_partitioned_groups_flat, True
    if isinstance(optimizer, BF16_Optimizer):
        return optimizer.fp32_groups_flat_partition, False
    return optimizer.single_partition_of_fp32_groups, False


def _own_zeros(optimizer: Any, flat: torch.Tensor, key: str, dtype: torch.dtype) -> torch.Tensor:
    """The optimizer's own tensor of a partition, whose fp32 weights are `flat`, set to zero, or a
    new one that takes its place."""
    base, own = getattr(optimizer, "optimizer", None), None
    is_elsewhere = getattr(optimizer, "swap_optimizer", False)  # on a disk: DeepSpeed moves it
    if key == MASTER and not is_elsewhere:
        own = flat.detach()
    elif isinstance(base, torch.optim.Optimizer) and not is_elsewhere:
        state = base.state[flat]
        if key not in state:
            state[key] = torch.zeros_like(flat, dtype=dtype)
        own = state[key]
    if own is None or (own.shape, own.dtype) != (flat.shape, dtype):
        return torch.zeros(flat.numel(), dtype=dtype)
    return own.zero_()


def _common_scalars(parameters: Iterable[ParameterState]) -> dict[str, Any]:
    """The number of steps of a buffer's parameters. Raises CheckpointError if not."""
    scalars = [each.scalars for each in parameters if each.scalars]
    for other in scalars:
        if other != scalars[0]:
            raise CheckpointError(
                f"parameters of one optimizer group were trained for different numbers of steps "
                f"({scalars[0]} and {other}), which ZeRO cannot represent; resume with ZeRO stage 0"
            )
    # A copy: optimizers increment the count in place, for each buffer.
    return copy.deepcopy(scalars[0]) if scalars else {}


def _groups(source: SourceEngine, live_groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The saved groups, with the live groups' parameters."""
    return [
        {**saved, "params": live["params"]}
        for saved, live in zip(source.groups, live_groups, strict=True)
    ]
