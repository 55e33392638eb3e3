"""A model's weights as one file, out of a checkpoint that DeepSpeed has written.

DeepSpeed's own ``zero_to_fp32`` leaves out frozen weights under ZeRO-1, and one name of a module
that its parent holds under two names. Here every name of the model's ``state_dict`` is exported:
from the optimizer's fp32 shards where they have it, else from the module's own state.

Reading constructs nothing but tensors and plain data, unless the reader trusts the checkpoint.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from trial_core.controller.safe_load import Reader
from trial_core.deepspeed.checkpoint_classes import CHECKPOINT_CLASSES
from trial_core.deepspeed.export.consolidate import consolidated
from trial_core.deepspeed.reshard.parameter_state import MASTER, Parameter
from trial_core.errors import CheckpointError, StorageError

Weights = dict[str, torch.Tensor]
Precision = Literal["fp32", "16bit"]

_HALVES = (torch.float16, torch.bfloat16)
_MODEL_STATES = re.compile(r"(zero_pp_rank_\d+_)?mp_rank_(\d+)_model_states\.pt")
_LAYER = re.compile(r"layer_(\d+)-(?:model_(\d+)-)?model_states\.pt")
_logger = logging.getLogger(__name__)


def export_weights(
    folder: Path, engine: int = 0, dtype: Precision = "fp32", reader: Reader | None = None
) -> Weights:
    """The weights and persistent buffers of one engine, by the names of its ``state_dict``.

    Tied names map to one and the same tensor. All tensors are on the CPU, contiguous, and share
    no memory otherwise. Called by one process; no ranks are needed.

    Args:
        folder: a checkpoint's files, verified; those of tag ``model{engine}`` are enough.
        engine: which, in the order in which the trial wrapped them.
        dtype: ``fp32``: consolidated from ZeRO's shards, what the optimizer steps on; 16-bit
            floats that have no such copy are widened. ``16bit``: what the model computes with,
            as ``save_16bit_model`` gives it.
        reader: reads the files; by default one that trusts nobody.

    Raises:
        CheckpointError: there are no such weights; or they are split over ranks in a way that
            this does not put together; or the files hold objects that the reader does not trust.
    """
    reader = reader or Reader(classes=CHECKPOINT_CLASSES)
    files = sorted((folder / f"model{engine}").glob("*.pt"))
    if any("_expert_" in file.name for file in files):
        raise CheckpointError(
            f"engine {engine} has a mixture of experts, whose weights DeepSpeed keeps in a file "
            "for each expert: export cannot put them together"
        )
    if any(file.name.startswith("layer_") for file in files):
        return _pipeline_weights(files, engine, dtype, reader)
    states = _model_states(files, folder, engine)
    state = reader.load_mapped(states)
    module = _tensors(state["module"])
    has_halves = _has_halves(module, engine, dtype)
    is_partitioned = states.name.startswith("zero_pp_rank")
    has_shards = any(file.name.endswith("_optim_states.pt") for file in files)
    masters: Mapping[str, Parameter] = {}
    if is_partitioned or (has_shards and dtype == "fp32"):
        masters = consolidated(folder / f"model{engine}", reader.load_mapped)
    elif dtype == "fp32" and has_halves:
        _logger.warning(
            "engine %d was trained without ZeRO: its checkpoint is read for 16-bit weights alone, "
            "and the exported fp32 ones are those, widened",
            engine,
        )
    buffers = set(state.get("buffer_names") or ())
    shared = state.get("shared_params") or {}
    kept = _ties(module, shared)
    weights: Weights = {}
    for name, held in module.items():
        if kept[name] != name:
            weights[name] = weights[kept[name]]
            continue
        master = None if name in buffers else masters.get(name, masters.get(shared.get(name, "")))
        if master is None and is_partitioned and name not in buffers and held.numel() == 0:
            raise CheckpointError(
                f"DeepSpeed's ZeRO-3 checkpoint does not hold {name!r}: probably a module that "
                "its parent holds under two names. Give it one name, or train it with ZeRO 0 to 2"
            )
        if master is None:
            weights[name] = _copied(held, dtype)
        else:
            goal = _goal(master.states[MASTER], held.dtype, dtype)
            weights[name] = master.whole(MASTER, goal)
    return weights


def write_weights(weights: Weights, target: Path, facts: Mapping[str, str]) -> None:
    """Write weights to a file: safetensors, or ``torch.save`` where it is called so.

    safetensors keeps one copy of tied weights, under the first of their names; the metadata maps
    each other name to that one, as ``safetensors.torch.save_model`` does, and ``load_model`` ties
    them again. ``torch.save`` keeps the tie itself.

    Args:
        target: ends in ``.safetensors``; anything else is a ``state_dict`` for ``torch.load``.
        facts: more metadata, for safetensors.

    Raises:
        StorageError: the file cannot be written.
    """
    try:
        if target.suffix == ".safetensors":
            _write_safetensors(weights, target, facts)
        else:
            torch.save(weights, target)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise StorageError(f"cannot write {target}: {error}; make room there") from error


def _write_safetensors(weights: Weights, target: Path, facts: Mapping[str, str]) -> None:
    first: dict[int, str] = {}
    for name, tensor in weights.items():
        first.setdefault(id(tensor), name)
    kept = {name: weights[name] for name in first.values()}
    tied = {name: first[id(each)] for name, each in weights.items() if name not in kept}
    save_file(kept, target, metadata={**facts, **tied, "format": "pt"})


def _model_states(files: list[Path], folder: Path, engine: int) -> Path:
    """The file that holds the module's state, or its outline under ZeRO-3."""
    tag = f"model{engine}"
    states = {file: match for file in files if (match := _MODEL_STATES.fullmatch(file.name))}
    _refuse_parts({match[2] for match in states.values()}, engine)
    if not states:
        raise CheckpointError(
            f"DeepSpeed's weights of engine {engine} ({tag}/*_model_states.pt) are not in {folder}"
        )
    return next(iter(states))


def _pipeline_weights(files: list[Path], engine: int, dtype: Precision, reader: Reader) -> Weights:
    """A pipeline's weights: each layer's are in a file of its own, whole.

    They are named as in a ``torch.nn.Sequential`` of the layers: ``0.weight``. DeepSpeed does not
    save which layers are tied, so each of them has its own, equal copy.
    """
    layers = {file: match for file in files if (match := _LAYER.fullmatch(file.name))}
    _refuse_parts({match[2] for match in layers.values()}, engine)
    module: Weights = {}
    for file, match in sorted(layers.items(), key=lambda item: int(item[1][1])):
        layer = reader.load_mapped(file)
        named = _tensors(layer).items()
        module.update({f"{int(match[1])}.{name}": tensor for name, tensor in named})
    if _has_halves(module, engine, dtype) and dtype == "fp32":
        raise CheckpointError(
            f"engine {engine} is a pipeline trained in 16 bits: the fp32 copies of its weights lie "
            "in every stage's optimizer state, which export does not put together. Export with "
            "--dtype 16bit"
        )
    kept = _ties(module, {})
    weights: Weights = {}
    for name, held in module.items():
        tie = weights.get(kept[name])
        weights[name] = _copied(held, dtype) if tie is None else tie
    return weights


def _refuse_parts(parts: Set[str | None], engine: int) -> None:
    if len(parts) > 1:
        raise CheckpointError(
            f"engine {engine} is split over {len(parts)} model-parallel ranks: how its parts "
            "belong together is known to the trial alone, so export cannot join them"
        )


def _has_halves(module: Weights, engine: int, dtype: Precision) -> bool:
    """Whether there are 16-bit weights.

    Raises:
        CheckpointError: there are none, and they are wanted.
    """
    has_halves = any(each.dtype in _HALVES for each in module.values())
    if dtype == "16bit" and not has_halves:
        raise CheckpointError(
            f"engine {engine} was trained in fp32, and has no 16-bit weights: export with --dtype "
            "fp32, and convert what comes out"
        )
    return has_halves


def _tensors(module: Mapping[str, Any]) -> Weights:
    odd = sorted(name for name, value in module.items() if not isinstance(value, torch.Tensor))
    if odd:
        _logger.warning("not exported, since they are no tensors: %s", ", ".join(odd))
    return {name: value for name, value in module.items() if name not in odd}


def _ties(module: Weights, shared: Mapping[str, str]) -> dict[str, str]:
    """For each name the first one that has the same weights.

    Args:
        shared: what DeepSpeed says of tied parameters; all there is under ZeRO-3, where the
            module's state is an outline. Elsewhere names of one tensor still share its memory.
    """
    first: dict[Any, str] = {}
    kept = {}
    for name, tensor in module.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else name
        kept[name] = first.setdefault(place, name)
    for name, other in shared.items():
        if kept.get(name) == name and other in kept:
            kept[name] = kept[other]
    return kept


def _copied(tensor: torch.Tensor, dtype: Precision) -> torch.Tensor:
    """A tensor of its own memory: it may be a view of a whole group of parameters."""
    goal = _goal(tensor.dtype, tensor.dtype, dtype)
    return tensor.detach().to(goal, copy=True, memory_format=torch.contiguous_format)


def _goal(stored: torch.dtype, held: torch.dtype, dtype: Precision) -> torch.dtype:
    """The type to export what is stored as one, and computed with as another."""
    if dtype == "16bit":
        return held
    return torch.float32 if stored in _HALVES else stored
