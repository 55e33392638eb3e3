"""The fp32 weights in a ZeRO checkpoint, put together from the shards of all ranks.

What DeepSpeed's ``zero_to_fp32`` does, but for two things: it unpickles whatever it finds in the
files; here they are read by who is trusted with it. And it has the whole model in memory twice;
here a weight takes memory once it is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trial_core.deepspeed.reshard.parameter_state import MASTER, Keys, Parameter, Shapes
from trial_core.deepspeed.reshard.partitions import Partitions, part_of_each
from trial_core.errors import CheckpointError

_RANK = re.compile(r"zero_pp_rank_(\d+)_")
_OPTIMIZER = "optimizer_state_dict"


def consolidated(folder: Path, read: Callable[[Path], Any]) -> dict[str, Parameter]:
    """The weights of one engine, by name, each with its `MASTER` alone: those that are trained, and
    under ZeRO-3 frozen ones too. Called by one process; no ranks are needed.

    Args:
        folder: the files of the engine's tag.
        read: what a file holds; its tensors mapped, if there is not to be memory for all.

    Raises:
        CheckpointError: a shard is missing, or they are no shards of ZeRO's.
    """
    models = [read(file) for file in _by_rank(folder, "model")]
    shards = [read(file)[_OPTIMIZER] for file in _by_rank(folder, "optim")]
    first = shards[0] if shards else {}
    cuts_each = "fp32_flat_groups" in first
    masters = Keys.of(cuts_each).masters
    if not models or masters not in first:
        raise CheckpointError(
            f"{folder} holds no fp32 weights of ZeRO's: expected *_model_states.pt, and "
            f"*_optim_states.pt with {masters}; was it saved by this version of DeepSpeed?"
        )
    _require_all(folder, first, len(shards))
    parts = [[flat.detach() for flat in shard[masters]] for shard in shards]
    shapes, paddings = models[0]["param_shapes"], first.get("param_alignment_paddings")
    cut = Partitions(shapes, paddings, len(shards), cuts_each)
    return {**_trained(shapes, parts, cut), **(_frozen(models) if cuts_each else {})}


def _trained(
    buffers: Sequence[Shapes], parts: Sequence[Sequence[torch.Tensor]], cut: Partitions
) -> dict[str, Parameter]:
    """The parameters that the optimizer steps on.

    Args:
        parts: each rank's partitions.
    """
    found = {
        # With a piece of no elements: a parameter may have none at all.
        name: Parameter(shape, buffer, [(0, {MASTER: parts[0][buffer][:0]})])
        for buffer, shapes in enumerate(buffers)
        for name, shape in shapes.items()
    }
    for buffer in range(len(buffers)):
        # The first rank's is as large as any.
        size = parts[0][buffer].numel()
        for rank, own in enumerate(parts):
            for piece in cut.pieces(buffer, rank, size):
                flat = own[buffer][piece.offset : piece.offset + piece.count]
                found[piece.name].pieces.append((piece.first, {MASTER: flat}))
    return found


def _frozen(models: Sequence[Mapping[str, Any]]) -> dict[str, Parameter]:
    """The parameters of ZeRO-3 that nobody trains: each rank's model states have a part of them."""
    shapes = models[0].get("frozen_param_shapes") or {}
    found = {name: Parameter(shape, 0) for name, shape in shapes.items()}
    for name, parameter in found.items():
        elements = parameter.shape.numel()
        part = part_of_each(elements, len(models))
        for rank, model in enumerate(models):
            flat = model["frozen_param_fragments"][name].detach().flatten()
            piece = flat[: max(0, elements - rank * part)]
            parameter.pieces.append((rank * part, {MASTER: piece}))
    return found


def _require_all(folder: Path, first: Mapping[str, Any], shards: int) -> None:
    """Check that the shards of all data-parallel ranks are there."""
    counts = first.get("partition_count", shards)
    expected = max(counts) if isinstance(counts, Sequence) else int(counts)
    if shards != expected:
        raise CheckpointError(
            f"{folder} has the *_optim_states.pt of {shards} data-parallel ranks, and {expected} "
            "saved it: fetch all of them"
        )


def _by_rank(folder: Path, kind: str) -> list[Path]:
    """Files of a kind, in the order of the data-parallel ranks that wrote them."""

    def rank(file: Path) -> int:
        match = _RANK.search(file.name)
        return int(match[1]) if match else 0

    return sorted(folder.glob(f"*_{kind}_states.pt"), key=rank)
