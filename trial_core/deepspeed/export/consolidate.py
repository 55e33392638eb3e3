"""Consolidates the fp32 weights of a ZeRO checkpoint from the shards of all ranks.

Does what DeepSpeed's ``zero_to_fp32`` does, with two differences: the caller reads the files, so
nothing is unpickled unchecked; and a weight takes memory only when it is used, where DeepSpeed
holds the whole model in memory twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trial_core.deepspeed.reshard.parameter_state import MASTER, ParameterState, ZeroStateKeys
from trial_core.deepspeed.reshard.partitions import Partitions, Shapes, zero3_part_elements
from trial_core.errors import CheckpointError

_RANK = re.compile(r"zero_pp_rank_(\d+)_")
_OPTIMIZER = "optimizer_state_dict"


def consolidated(folder: Path, read: Callable[[Path], Any]) -> dict[str, ParameterState]:
    """One engine's weights by name, each with the key `MASTER` only.

    Holds the trained weights, and under ZeRO-3 the frozen ones too. Called by one process; needs no
    other ranks.

    Args:
        folder: the files under the engine's tag.
        read: reads a file; should map tensors, so that they need no memory.

    Raises:
        CheckpointError: a shard is missing, or the files are not ZeRO shards.
    """
    models = [read(file) for file in _by_rank(folder, "model")]
    shards = [read(file)[_OPTIMIZER] for file in _by_rank(folder, "optim")]
    first = shards[0] if shards else {}
    is_zero3 = "fp32_flat_groups" in first
    key = ZeroStateKeys.of(is_zero3).masters
    if not models or key not in first:
        raise CheckpointError(
            f"{folder} holds no fp32 weights of ZeRO: expected *_model_states.pt, and "
            f"*_optim_states.pt with {key}, as this version of DeepSpeed saves them"
        )
    _require_all_shards(folder, first, len(shards))
    masters = [[flat.detach() for flat in shard[key]] for shard in shards]
    shapes, paddings = models[0]["param_shapes"], first.get("param_alignment_paddings")
    partitions = Partitions(shapes, paddings, len(shards), is_zero3)
    return {**_trained(masters, partitions), **(_frozen(models) if is_zero3 else {})}


def _trained(
    masters: Sequence[Sequence[torch.Tensor]], partitions: Partitions
) -> dict[str, ParameterState]:
    """The trained parameters, from each rank's flat partitions."""
    found = {
        # With an empty fragment: a parameter may have no elements.
        name: ParameterState(shape, buffer, [(0, {MASTER: masters[0][buffer][:0]})])
        for buffer, shapes in enumerate(partitions.buffers)
        for name, shape in shapes.items()
    }
    for buffer in range(len(partitions.buffers)):
        partition_elements = masters[0][buffer].numel()  # no other rank's is larger
        for rank, flat_partitions in enumerate(masters):
            for fragment in partitions.fragments(buffer, rank, partition_elements):
                end = fragment.offset + fragment.count
                view = flat_partitions[buffer][fragment.offset : end]
                found[fragment.name].fragments.append((fragment.first, {MASTER: view}))
    return found


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


def _require_all_shards(folder: Path, first: Mapping[str, Any], shards: int) -> None:
    counts = first.get("partition_count", shards)
    expected = max(counts) if isinstance(counts, Sequence) else int(counts)
    if shards != expected:
        raise CheckpointError(
            f"{folder} has the *_optim_states.pt of {shards} data-parallel ranks, but {expected} "
            "ranks saved the checkpoint; fetch all shards"
        )


def _by_rank(folder: Path, kind: str) -> list[Path]:
    """Files of a kind, in the order of data-parallel ranks."""

    def rank(file: Path) -> int:
        match = _RANK.search(file.name)
        return int(match[1]) if match else 0

    return sorted(folder.glob(f"*_{kind}_states.pt"), key=rank)
