"""What an engine of this process would have saved, with values out of a checkpoint of another one.

In the form in which DeepSpeed loads it, for this rank.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import is_optimized_parameter
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from trial_core.deepspeed.reshard.parameter_state import MASTER, Keys, Parameter
from trial_core.deepspeed.reshard.partitions import Partitions, part_of_each
from trial_core.deepspeed.reshard.source_engine import SavedEngine
from trial_core.errors import CheckpointError

_ZERO = (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3, BF16_Optimizer)


def check_engine(engine: DeepSpeedEngine) -> None:
    """Refuse an engine whose state lies in a way that is not known here.

    Raises:
        CheckpointError: says which.
    """
    odd = None
    if engine.has_moe_layers:
        odd = "a mixture of experts"
    elif engine.zero_nvme_offload_optimizer():
        odd = "optimizer states on NVMe"
    elif engine.zero_optimization() and engine.zero_elastic_checkpoint():
        odd = "zero_optimization.elastic_checkpoint"
    elif engine.zero_optimization() and type(engine.optimizer) not in _ZERO:
        odd = f"DeepSpeed's {type(engine.optimizer).__name__}"
    if odd is not None:
        raise CheckpointError(
            f"an engine with {odd} resumes only with as many ranks and the ZeRO stage that saved "
            "the checkpoint; use those, or take the weights alone: "
            "searcher.source_weights_only=true"
        )


def shapes_by_group(engine: DeepSpeedEngine) -> list[dict[str, torch.Size]]:
    """The shapes of the trained parameters in each of the optimizer's groups, in their order.

    Raises:
        CheckpointError: DeepSpeed has wrapped the optimizer in a way that is not known here.
    """
    optimizer = engine.optimizer
    groups: list[list[Any]]
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        groups = [[] for _ in optimizer.param_groups]
        for part, parameters in enumerate(optimizer.fp16_groups):
            groups[optimizer.sub_group_to_group_id[part]] += parameters
    elif isinstance(optimizer, BF16_Optimizer):
        groups = optimizer.bf16_groups
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        groups = optimizer.bit16_groups
    elif isinstance(optimizer, torch.optim.Optimizer):
        groups = [_optimized(group["params"]) for group in optimizer.param_groups]
    else:
        raise CheckpointError(
            "an engine without ZeRO, in 16 bits, resumes only from a checkpoint that was saved "
            "without ZeRO; use ZeRO stage 1, or take the weights alone: "
            "searcher.source_weights_only=true"
        )
    return [
        {engine.param_names[each]: getattr(each, "ds_shape", each.shape) for each in group}
        for group in groups
    ]


def module_state(engine: DeepSpeedEngine, saved: SavedEngine) -> dict[str, Any] | None:
    """The module's state: whole, or under ZeRO-3 an outline, with nothing in it of the weights."""
    if saved.model["module"] is None:
        return None  # a pipeline's, which lies in files of its layers
    cut = {
        name
        for name, parameter in engine.module.named_parameters(remove_duplicate=False)
        if hasattr(parameter, "ds_id")
    }
    return {
        name: torch.empty(0, dtype=held.dtype) if name in cut else saved.whole(name)
        for name, held in saved.model["module"].items()
    }


def frozen_fragments(engine: DeepSpeedEngine, saved: SavedEngine) -> dict[str, torch.Tensor]:
    """ZeRO-3's parts of the frozen parameters; of those that were not saved, the present ones.

    Raises:
        CheckpointError: DeepSpeed keeps them in a way that is not known here.
    """
    rank, ranks = _place(engine)
    fragments = {}
    for parameter in engine.module.parameters():
        if is_optimized_parameter(parameter):
            continue
        name = engine.param_names[parameter]
        fragment = parameter.ds_tensor.detach()
        if name in saved.model["module"]:
            part = part_of_each(parameter.ds_numel, ranks)
            if fragment.numel() != part or not fragment.is_floating_point():
                raise CheckpointError(
                    f"the frozen parameter {name} lies here as {fragment.numel()} elements of "
                    f"{fragment.dtype}, where {part} floats were expected; resume with as many "
                    "ranks and the ZeRO stage that saved the checkpoint"
                )
            own = saved.whole(name).flatten()[rank * part : (rank + 1) * part]
            fragment = torch.zeros(part, dtype=own.dtype)
            fragment[: own.numel()] = own
        fragments[name] = fragment
    return fragments


def partitions(
    engine: DeepSpeedEngine, present: Mapping[str, Any], saved: SavedEngine
) -> dict[str, Any]:
    """This rank's partitions of weights and optimizer state, under ZeRO's names for them.

    Args:
        present: what the engine's optimizer would save now.
    """
    flats, cuts_each = _flats(engine.optimizer)
    keys = Keys.of(cuts_each)
    rank, ranks = _place(engine)
    cut = Partitions(
        engine._get_zero_param_shapes(), present.get("param_alignment_paddings"), ranks, cuts_each
    )
    masters, state = [], {}
    for buffer, flat in enumerate(flats):
        everybody = [saved.parameters[name] for name in cut.buffers[buffer]]
        made = {
            key: torch.zeros(flat.numel(), dtype=dtype) for key, dtype in _states(everybody).items()
        }
        for piece in cut.pieces(buffer, rank, flat.numel()):
            for key, tensor in made.items():
                part = tensor[piece.offset : piece.offset + piece.count]
                saved.parameters[piece.name].copy(key, piece.first, part)
        masters.append(made.pop(MASTER))
        state[buffer] = {**made, **_values(everybody)}
    base = {
        "state": {buffer: each for buffer, each in state.items() if each},
        "param_groups": _groups(saved, present[keys.base]["param_groups"]),
    }
    return {keys.masters: masters, keys.base: base}


def whole_optimizer(engine: DeepSpeedEngine, saved: SavedEngine) -> dict[str, Any]:
    """The state of an optimizer that has the parameters themselves: without ZeRO."""
    present = engine.optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    for group, outline in zip(engine.optimizer.param_groups, present["param_groups"], strict=True):
        for live, index in zip(group["params"], outline["params"], strict=True):
            if is_optimized_parameter(live):
                parameter = saved.parameters[engine.param_names[live]]
                made = {key: parameter.whole(key) for key in parameter.states if key != MASTER}
                if made or parameter.values:
                    state[index] = {**made, **copy.deepcopy(parameter.values)}
    return {"state": state, "param_groups": _groups(saved, present["param_groups"])}


# --------------------------------------------------------------------------------- internals


def _optimized(parameters: Iterable[Any]) -> list[Any]:
    return [each for each in parameters if is_optimized_parameter(each)]


def _place(engine: DeepSpeedEngine) -> tuple[int, int]:
    """This rank among those that share the optimizer's state, and how many they are."""
    group = engine.optimizer.dp_process_group
    return dist.get_rank(group=group), dist.get_world_size(group=group)


def _flats(optimizer: Any) -> tuple[list[torch.Tensor], bool]:
    """This rank's partitions of the fp32 weights, and whether each parameter is cut by itself."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return optimizer.fp32_partitioned_groups_flat, True
    if isinstance(optimizer, BF16_Optimizer):
        return optimizer.fp32_groups_flat_partition, False
    return optimizer.single_partition_of_fp32_groups, False


def _states(parameters: Iterable[Parameter]) -> dict[str, torch.dtype]:
    """What there is of each element of any of them. Without ZeRO some may have had no gradient."""
    return {key: dtype for each in parameters for key, dtype in each.states.items()}


def _values(parameters: Iterable[Parameter]) -> dict[str, Any]:
    """What the optimizer has of these parameters as one: the number of steps.

    Raises:
        CheckpointError: they differ in it.
    """
    different = [each.values for each in parameters if each.values]
    if any(values != different[0] for values in different):
        raise CheckpointError(
            f"the optimizer has gone {different[0]} with some parameters and others with others, "
            "which ZeRO cannot represent; resume with ZeRO stage 0"
        )
    # A copy: optimizers count in it, each part of a group by itself.
    return copy.deepcopy(different[0]) if different else {}


def _groups(saved: SavedEngine, outlines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The optimizer's groups as they were, with the parameters of the present ones."""
    return [
        {**group, "params": outline["params"]}
        for group, outline in zip(saved.groups, outlines, strict=True)
    ]
