"""Consolidates the fp32 weights of a ZeRO checkpoint from the shards of all ranks.

Works like DeepSpeed's ``zero_to_fp32``, with three differences: the caller reads the files, so
nothing is unpickled unchecked; a weight takes memory only when it is used, where DeepSpeed holds
the whole model in memory twice; and the experts of all expert-parallel ranks are found.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trial_core.checkpoint.weights.weights import Precision, SavedWeight, saved_weight, target_type
from trial_core.deepspeed.reshard.parameter_state import (
    MASTER,
    ParameterState,
    Partitions,
    Shapes,
    zero3_part_elements,
    zero_keys,
)
from trial_core.deepspeed.reshard.saved_state import (
    MODEL_STATES,
    OPTIMIZER_STATES,
    ReadFile,
    rank_files,
)
from trial_core.errors import CheckpointError

_EXPERT = re.compile(r"(.*deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..*)")


def consolidated(folder: Path, read: ReadFile, model_rank: int) -> dict[str, ParameterState]:
    """The weights of one model-parallel rank or pipeline stage, each with the key `MASTER` only.

    Holds the trained weights, and under ZeRO-3 the frozen ones too. Experts have their global
    names. Without ZeRO (a pipeline in bf16), shapes are flat. Called by one process; needs no other
    ranks. `folder` has the files under the engine's tag. Raises CheckpointError if a shard is
    missing, or the files are not ZeRO shards.
    """
    models = [read(file) for _, file in rank_files(folder, MODEL_STATES, model_rank)]
    files = [file for _, file in rank_files(folder, OPTIMIZER_STATES, model_rank)]
    shards = [read(file)["optimizer_state_dict"] for file in files]
    first = shards[0] if shards else {}
    is_zero3 = "fp32_flat_groups" in first
    key, _ = zero_keys(is_zero3)
    if not models or key not in first:
        raise CheckpointError(
            f"{folder} holds no fp32 weights of ZeRO: expected *_model_states.pt, and "
            f"*_optim_states.pt with {key}, as this version of DeepSpeed saves them"
        )
    counts = first.get("partition_count", len(shards))
    shapes = [
        {name: torch.Size(shape) for name, shape in each.items()}  # with experts they are tuples
        for each in models[0]["param_shapes"] or _flat_shapes(shards)
    ]
    replicas = counts if isinstance(counts, Sequence) else [int(counts)] * len(shapes)
    if len(shards) != (expected := max(replicas, default=len(shards))):
        raise CheckpointError(
            f"{folder} has the *_optim_states.pt of {len(shards)} data-parallel ranks, but "
            f"{expected} ranks saved the checkpoint; fetch all shards"
        )
    masters = [[flat.detach() for flat in shard[key]] for shard in shards]
    paddings = first.get("param_alignment_paddings")
    partitions = Partitions(shapes, paddings, len(shards), is_zero3)
    is_strided = not models[0].get("ds_config", {}).get("use_data_before_expert_parallel", False)
    trained = _trained(masters, partitions, replicas, is_strided)
    return {**trained, **(_frozen(models) if is_zero3 else {})}


def exported(saved: torch.Tensor, master: ParameterState | None, dtype: Precision) -> SavedWeight:
    """A weight to export: `saved` as the module has it, or its fp32 copy if there is one."""
    if master is None:
        return saved_weight(saved, dtype)
    target = target_type(master.dtypes[MASTER], saved.dtype, dtype)
    shape = saved.shape if saved.numel() else master.shape  # a placeholder under ZeRO-3
    return SavedWeight(shape, target, lambda: master.full_tensor(MASTER, target).view(shape))


def _trained(
    masters: Sequence[Sequence[torch.Tensor]],
    partitions: Partitions,
    replicas: Sequence[int],
    is_strided: bool,
) -> dict[str, ParameterState]:
    """The trained parameters, from each rank's flat partitions.

    Each copy of a buffer is shared by as many ranks as `replicas` says: experts have fewer than
    there are ranks, and as many different buffers as there are expert-parallel ranks. If they are
    strided, neighbouring ranks hold different experts.
    """
    found: dict[str, ParameterState] = {}
    for buffer, shapes in enumerate(partitions.buffers):
        count = replicas[buffer]
        different = len(masters) // count
        for part in range(different):
            sharing = masters[part::different] if is_strided else masters[part * count :][:count]
            named = _global_names(shapes, part)
            for name, shape in shapes.items():
                # With an empty fragment: a parameter may have no elements.
                empty = [(0, {MASTER: sharing[0][buffer][:0]})]
                found[named[name]] = ParameterState(shape, buffer, empty)
            partition_elements = sharing[0][buffer].numel()  # no other rank's is larger
            for place, flat_partitions in enumerate(sharing):
                for fragment in partitions.fragments(buffer, place, partition_elements):
                    end = fragment.offset + fragment.count
                    view = flat_partitions[buffer][fragment.offset : end]
                    found[named[fragment.name]].fragments.append((fragment.first, {MASTER: view}))
    return found


def _global_names(shapes: Shapes, part: int) -> dict[str, str]:
    """The parameters' names in the whole model; an expert's index counts those of earlier ranks."""
    experts = {name: match for name in shapes if (match := _EXPERT.fullmatch(name))}
    local: dict[str, set[str]] = {}
    for match in experts.values():
        local.setdefault(match[1], set()).add(match[2])
    return {name: name for name in shapes} | {
        name: f"{match[1]}{part * len(local[match[1]]) + int(match[2])}{match[3]}"
        for name, match in experts.items()
    }


def _flat_shapes(shards: Sequence[Mapping[str, Any]]) -> list[dict[str, list[int]]]:
    """The sizes of the parameters, where DeepSpeed saves only the places of their fragments."""
    buffers: list[dict[str, int]] = [{} for _ in shards[0]["param_slice_mappings"]]
    for shard in shards:
        for sizes, places in zip(buffers, shard["param_slice_mappings"], strict=True):
            for name, place in places.items():
                sizes[name] = sizes.get(name, 0) + place.numel
    return [{name: [size] for name, size in sizes.items()} for sizes in buffers]


def _frozen(models: Sequence[Mapping[str, Any]]) -> dict[str, ParameterState]:
    """The frozen parameters under ZeRO-3; each rank's model states hold a part."""
    shapes: Shapes = models[0].get("frozen_param_shapes") or {}
    found = {name: ParameterState(shape, 0) for name, shape in shapes.items()}
    for name, parameter in found.items():
        elements = parameter.shape.numel()
        part = zero3_part_elements(elements, len(models))
        for rank, model in enumerate(models):
            flat = model["frozen_param_fragments"][name].detach().flatten()
            view = flat[: max(0, elements - rank * part)]
            parameter.fragments.append((rank * part, {MASTER: view}))
    return found
