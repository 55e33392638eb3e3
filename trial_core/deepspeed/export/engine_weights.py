"""Exports an engine's weights from a checkpoint that DeepSpeed has written.

DeepSpeed's ``zero_to_fp32`` omits frozen weights under ZeRO-1, and the second name of a module
that its parent holds under two names. Here every name of the model's ``state_dict`` is exported:
from the optimizer's fp32 shards if they hold it, otherwise from the module's own state.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
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

from trial_core.checkpoint.weights.weights import (
    Precision,
    SavedWeight,
    first_names,
    has_16bit_weights,
    tensors_of,
)
from trial_core.deepspeed.export.consolidate import consolidated, exported
from trial_core.deepspeed.export.pipeline_weights import LAYER, not_joined, pipeline_weights
from trial_core.deepspeed.fingerprints import check_exported, fingerprints_of
from trial_core.deepspeed.reshard.parameter_state import ParameterState
from trial_core.deepspeed.reshard.saved_state import MODEL_STATES, OPTIMIZER_STATES, rank_files
from trial_core.deepspeed.validated_weights import read_validated, with_validated
from trial_core.errors import CheckpointError
from trial_core.rank.state_files.safe_load import Reader

_EXPERT = re.compile(r"layer_\d+_expert_\d+_mp_rank_(\d+)_model_states\.pt")
_logger = logging.getLogger(__name__)


def checked_weights(
    folder: Path, engine: int, dtype: Precision, reader: Reader
) -> dict[str, SavedWeight]:
    """Like `saved_weights`; each weight is compared with its fingerprint when it is read.

    Where validations saw other weights than those of training, theirs.
    """
    known = fingerprints_of(folder, engine)

    def read(name: str, weight: SavedWeight) -> torch.Tensor:
        tensor = weight.read()
        check_exported(known, {name: tensor})
        return tensor

    checked: dict[SavedWeight, SavedWeight] = {}
    saved = saved_weights(folder, engine, dtype, reader)
    for name, weight in saved.items():
        if weight not in checked:
            checked[weight] = replace(weight, read=partial(read, name, weight))
    trained = {name: checked[weight] for name, weight in saved.items()}
    return with_validated(trained, read_validated(folder, engine, reader), dtype)


def saved_weights(
    folder: Path, engine: int, dtype: Precision, reader: Reader
) -> dict[str, SavedWeight]:
    """The weights and persistent buffers of one engine, by the names of its ``state_dict``.

    All tensors are contiguous, on the CPU, and own their memory; tied names map to one weight,
    which takes memory only when it is read. Called by one process; needs no other ranks. Experts
    have their global names; a pipeline's layers are named as in a ``torch.nn.Sequential``. The
    parts of AutoTP's ranks are joined.

    Args:
        folder: a checkpoint's verified files, at least the ones of tag ``model{engine}``.
        dtype: ``fp32``: the weights that the optimizer steps on, from ZeRO's shards; 16-bit
            weights without an fp32 copy are converted. ``16bit``: the weights that the model
            computes with, as ``save_16bit_model`` writes them.

    Raises CheckpointError if the weights are missing; or ranks hold parts that export cannot join;
    or the files hold objects that the reader does not trust.
    """
    tag = folder / f"model{engine}"
    files = sorted(tag.glob("*.pt"))
    if any(LAYER.fullmatch(file.name) for file in files):
        return pipeline_weights(folder, engine, dtype, reader)
    ranks = sorted(
        {int(match[2]) for file in files if (match := MODEL_STATES.fullmatch(file.name))}
    )
    if not ranks:
        raise CheckpointError(
            f"{folder} has no DeepSpeed weights of engine {engine} "
            f"(model{engine}/*_model_states.pt)"
        )
    states = [_model_states(tag, files, rank, engine, reader) for rank in ranks]
    shared = states[0].get("shared_params") or {}  # only global rank 0 lists them
    parts = [
        _rank_weights(tag, {**state, "shared_params": shared}, rank, engine, dtype, reader)
        for rank, state in zip(ranks, states, strict=True)
    ]
    return _joined(parts, states[0], engine) if len(parts) > 1 else parts[0]


def _model_states(
    tag: Path, files: Sequence[Path], rank: int, engine: int, reader: Reader
) -> dict[str, Any]:
    """A model-parallel rank's model states, with the experts of all ranks."""
    state: dict[str, Any] = reader.load_mapped(rank_files(tag, MODEL_STATES, rank)[0][1])
    if state.get("ds_autoep_layers"):
        raise CheckpointError(
            f"engine {engine} has experts that DeepSpeed's AutoEP has divided; export does not "
            "know their layout: save them in the trial, or use deepspeed.moe.layer.MoE"
        )
    experts = [
        file for file in files if (match := _EXPERT.fullmatch(file.name)) and int(match[1]) == rank
    ]
    if len(experts) != (expected := sum(state.get("num_experts") or ())):
        raise CheckpointError(
            f"engine {engine} has {expected} experts, but the checkpoint has the files of "
            f"{len(experts)} (model{engine}/layer_…_expert_…_model_states.pt); fetch all files"
        )
    for file in experts:
        state["module"] = {**state["module"], **reader.load_mapped(file)}
    return state


def _rank_weights(
    tag: Path, state: Mapping[str, Any], rank: int, engine: int, dtype: Precision, reader: Reader
) -> dict[str, SavedWeight]:
    """The weights of a model-parallel rank; under ZeRO-3 its module holds placeholders for them."""
    module, shared = tensors_of(state["module"]), state["shared_params"]
    has_16bit = has_16bit_weights(module, f"engine {engine}", dtype)
    is_partitioned = rank_files(tag, MODEL_STATES, rank)[0][0] is not None
    has_shards = bool(rank_files(tag, OPTIMIZER_STATES, rank))
    masters: Mapping[str, ParameterState] = {}
    if is_partitioned or (has_shards and dtype == "fp32"):
        masters = consolidated(tag, reader.load_mapped, rank)
    elif dtype == "fp32" and has_16bit:
        _logger.warning(
            f"engine {engine} was trained without ZeRO, so export reads only 16-bit weights: the "
            "exported fp32 weights are converted from 16 bits"
        )
    buffers = set(state.get("buffer_names") or ())
    weights: dict[str, SavedWeight] = {}
    for each, first in first_names(module, shared).items():
        saved = module[each]
        if first != each:
            weights[each] = weights[first]
            continue
        master = None if each in buffers else masters.get(each, masters.get(shared.get(each, "")))
        if master is None and shared.get(each, each) not in module:
            continue  # frozen and tied: DeepSpeed leaves it out by its first name only
        if master is None and is_partitioned and each not in buffers and saved.numel() == 0:
            raise CheckpointError(
                f"DeepSpeed's ZeRO-3 checkpoint does not hold {each!r}; the probable cause is a "
                "module that its parent holds under two names. Give it one name, or train it with "
                "ZeRO 0 to 2"
            )
        weights[each] = exported(saved, master, dtype)
    return weights


def _joined(
    parts: Sequence[Mapping[str, SavedWeight]], state: Mapping[str, Any], engine: int
) -> dict[str, SavedWeight]:
    """The whole weights, of the parts that tensor-parallel ranks have saved.

    DeepSpeed's AutoTP saves an affine map of each parameter that it divides: which block of the
    whole belongs to which rank, in the first rank's model `state`. `ds_to_universal` joins by it,
    too. Raises CheckpointError if the checkpoint does not say how a weight is divided.
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
