"""Joins the parts of a weight that tensor-parallel ranks have saved.

DeepSpeed's AutoTP saves an affine map of each parameter that it divides: which block of the whole
belongs to which rank. `ds_to_universal` joins by the same map.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from deepspeed.checkpoint import UNIVERSAL_CHECKPOINT_INFO
from deepspeed.checkpoint.affine import AFFINE_MAP_FORMAT_VERSION, ParamAffineMap
from deepspeed.checkpoint.constants import (
    AFFINE_MAP,
    AFFINE_MAP_PARAMS,
    AFFINE_MAP_VERSION,
    TP_REPLICATED_PARAMETER_PATTERNS,
)

from trial_core.checkpoint.weights.weights import SavedWeight
from trial_core.errors import CheckpointError


def joined(
    parts: Sequence[Mapping[str, SavedWeight]], state: Mapping[str, Any], engine: int
) -> dict[str, SavedWeight]:
    """The whole weights.

    Args:
        parts: each model-parallel rank's weights.
        state: the first rank's model states, which say how AutoTP has divided the parameters.

    Raises:
        CheckpointError: the checkpoint does not say how a weight is divided.
    """
    info = state.get(UNIVERSAL_CHECKPOINT_INFO)
    if info is None:
        raise not_joined(engine, len(parts))
    maps = info.get(AFFINE_MAP) or {}
    version = maps.get(AFFINE_MAP_VERSION, AFFINE_MAP_FORMAT_VERSION)
    if version > AFFINE_MAP_FORMAT_VERSION:
        raise CheckpointError(
            f"engine {engine} has affine maps of version {version}, and the installed DeepSpeed "
            f"knows {AFFINE_MAP_FORMAT_VERSION}; install the DeepSpeed that saved the checkpoint"
        )
    replicated = dict.fromkeys(info[TP_REPLICATED_PARAMETER_PATTERNS], True)
    buffers = state.get("buffer_names") or ()
    whole: dict[SavedWeight, SavedWeight] = {}  # tied names are joined once
    weights: dict[str, SavedWeight] = {}
    for name, first in parts[0].items():
        if first not in whole:
            entry = _matching(maps.get(AFFINE_MAP_PARAMS) or {}, name)
            if entry is not None:
                whole[first] = _assembled(ParamAffineMap.from_dict(entry), name, parts)
            elif _matching(replicated, name) or (name in buffers and _is_equal(name, parts)):
                whole[first] = first
            else:
                raise CheckpointError(
                    f"engine {engine} is split over {len(parts)} model-parallel ranks, and "
                    f"DeepSpeed did not save how AutoTP has divided {name}; export cannot join it. "
                    "In the trial, engine.save_16bit_model gathers what it can"
                )
        weights[name] = whole[first]
    return weights


def not_joined(engine: int, parts: int) -> CheckpointError:
    """The error of a model that the trial itself has divided."""
    return CheckpointError(
        f"engine {engine} is split over {parts} model-parallel ranks; export cannot join "
        "its parts, because only the trial knows how it divides its weights"
    )


def _matching(patterns: Mapping[str, Any], name: str) -> Any:
    return next((value for each, value in patterns.items() if re.match(each, name)), None)


def _assembled(
    places: ParamAffineMap, name: str, parts: Sequence[Mapping[str, SavedWeight]]
) -> SavedWeight:
    def read() -> torch.Tensor:
        shards = {rank: part[name].read() for rank, part in enumerate(parts)}
        tensor: torch.Tensor = places.rebuild(shards)
        return tensor

    return SavedWeight(torch.Size(places.logical_shape), parts[0][name].dtype, read)


def _is_equal(name: str, parts: Sequence[Mapping[str, SavedWeight]]) -> bool:
    first = parts[0][name].read()
    return all(torch.equal(first, part[name].read()) for part in parts[1:])
