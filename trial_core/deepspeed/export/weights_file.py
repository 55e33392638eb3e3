"""Exports a model's weights from a checkpoint that DeepSpeed has written, as one file.

DeepSpeed's ``zero_to_fp32`` omits frozen weights under ZeRO-1, and the second name of a module
that its parent holds under two names. Here every name of the model's ``state_dict`` is exported:
from the optimizer's fp32 shards if they hold it, otherwise from the module's own state.

Reading constructs only tensors and plain data, unless the reader trusts the checkpoint.
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
from trial_core.deepspeed.checkpoint_engine import CHECKPOINT_CLASSES
from trial_core.deepspeed.export.consolidate import consolidated
from trial_core.deepspeed.reshard.parameter_state import MASTER, ParameterState
from trial_core.errors import CheckpointError, StorageError

Weights = dict[str, torch.Tensor]
Precision = Literal["fp32", "16bit"]

_16BIT_TYPES = (torch.float16, torch.bfloat16)
_MODEL_STATES = re.compile(r"(zero_pp_rank_\d+_)?mp_rank_(\d+)_model_states\.pt")
_LAYER = re.compile(r"layer_(\d+)-(?:model_(\d+)-)?model_states\.pt")
_logger = logging.getLogger(__name__)


def export_weights(
    folder: Path, engine: int = 0, dtype: Precision = "fp32", reader: Reader | None = None
) -> Weights:
    """The weights and persistent buffers of one engine, by the names of its ``state_dict``.

    All tensors are contiguous, on the CPU, and own their memory; tied names map to one tensor.
    Called by one process; needs no other ranks.

    Args:
        folder: a checkpoint's verified files, at least those of tag ``model{engine}``.
        engine: index of the engine, in the order in which the trial wrapped them.
        dtype: ``fp32``: the weights that the optimizer steps on, from ZeRO's shards; 16-bit
            weights without an fp32 copy are converted. ``16bit``: the weights that the model
            computes with, as ``save_16bit_model`` writes them.
        reader: reads the files; by default one that does not trust the checkpoint.

    Raises:
        CheckpointError: there are no such weights; or ranks hold parts that export cannot join; or
            the files hold objects that the reader does not trust.
    """
    reader = reader or Reader(classes=CHECKPOINT_CLASSES)
    files = sorted((folder / f"model{engine}").glob("*.pt"))
    if any("_expert_" in file.name for file in files):
        raise CheckpointError(
            f"engine {engine} has a mixture of experts; export does not support it, because "
            "DeepSpeed saves each expert's weights in a separate file"
        )
    if any(file.name.startswith("layer_") for file in files):
        return _pipeline_weights(files, engine, dtype, reader)
    model_file = _model_states(files, folder, engine)
    state = reader.load_mapped(model_file)
    module = _tensors(state["module"])
    has_16bit = _has_16bit_weights(module, engine, dtype)
    is_partitioned = model_file.name.startswith("zero_pp_rank")
    has_shards = any(file.name.endswith("_optim_states.pt") for file in files)
    masters: Mapping[str, ParameterState] = {}
    if is_partitioned or (has_shards and dtype == "fp32"):
        masters = consolidated(folder / f"model{engine}", reader.load_mapped)
    elif dtype == "fp32" and has_16bit:
        _logger.warning(
            "engine %d was trained without ZeRO, so export reads only 16-bit weights: the exported "
            "fp32 weights are converted from 16 bits",
            engine,
        )
    buffers = set(state.get("buffer_names") or ())
    shared = state.get("shared_params") or {}
    first_name = _first_names(module, shared)
    weights: Weights = {}
    for name, saved in module.items():
        if first_name[name] != name:
            weights[name] = weights[first_name[name]]
            continue
        master = None if name in buffers else masters.get(name, masters.get(shared.get(name, "")))
        if master is None and is_partitioned and name not in buffers and saved.numel() == 0:
            raise CheckpointError(
                f"DeepSpeed's ZeRO-3 checkpoint does not hold {name!r}; the probable cause is a "
                "module that its parent holds under two names. Give it one name, or train it with "
                "ZeRO 0 to 2"
            )
        if master is None:
            weights[name] = _copied(saved, dtype)
        else:
            target = _target_type(master.dtypes[MASTER], saved.dtype, dtype)
            weights[name] = master.full_tensor(MASTER, target)
    return weights


def write_weights(weights: Weights, target: Path, facts: Mapping[str, str]) -> None:
    """Write weights to a safetensors file, or with ``torch.save``.

    safetensors stores one copy of tied weights, under the first of their names. The metadata maps
    each other name to the first, as ``safetensors.torch.save_model`` does, so that ``load_model``
    ties them again. ``torch.save`` keeps the tie itself.

    Args:
        target: ``.safetensors``; any other suffix is a ``state_dict`` for ``torch.load``.
        facts: additional metadata for safetensors.

    Raises:
        StorageError: the file cannot be written.
    """
    try:
        if target.suffix == ".safetensors":
            _write_safetensors(weights, target, facts)
        else:
            torch.save(weights, target)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise StorageError(f"cannot write {target}: {error}; free space in its folder") from error


def _write_safetensors(weights: Weights, target: Path, facts: Mapping[str, str]) -> None:
    first: dict[int, str] = {}
    for name, tensor in weights.items():
        first.setdefault(id(tensor), name)
    stored = {name: weights[name] for name in first.values()}
    tied = {name: first[id(each)] for name, each in weights.items() if name not in stored}
    save_file(stored, target, metadata={**facts, **tied, "format": "pt"})


def _model_states(files: list[Path], folder: Path, engine: int) -> Path:
    """The file with the module's state; under ZeRO-3 it holds placeholders for the weights."""
    states = {file: match for file in files if (match := _MODEL_STATES.fullmatch(file.name))}
    _refuse_model_parallel({match[2] for match in states.values()}, engine)
    if not states:
        raise CheckpointError(
            f"{folder} has no DeepSpeed weights of engine {engine} "
            f"(model{engine}/*_model_states.pt)"
        )
    return next(iter(states))


def _pipeline_weights(files: list[Path], engine: int, dtype: Precision, reader: Reader) -> Weights:
    """A pipeline's weights, from one file for each layer.

    Names are those of a ``torch.nn.Sequential`` of the layers: ``0.weight``. DeepSpeed does not
    save which layers are tied, so each tied layer has its own, equal copy.
    """
    layers = {file: match for file in files if (match := _LAYER.fullmatch(file.name))}
    _refuse_model_parallel({match[2] for match in layers.values()}, engine)
    module: Weights = {}
    for file, match in sorted(layers.items(), key=lambda item: int(item[1][1])):
        named = _tensors(reader.load_mapped(file)).items()
        module.update({f"{int(match[1])}.{name}": tensor for name, tensor in named})
    if _has_16bit_weights(module, engine, dtype) and dtype == "fp32":
        raise CheckpointError(
            f"engine {engine} is a pipeline trained in 16 bits; export cannot consolidate its fp32 "
            "weights, which are in the optimizer state of every stage. Export with --dtype 16bit"
        )
    first_name = _first_names(module, {})
    weights: Weights = {}
    for name, saved in module.items():
        tie = weights.get(first_name[name])
        weights[name] = _copied(saved, dtype) if tie is None else tie
    return weights


def _refuse_model_parallel(parts: Set[str | None], engine: int) -> None:
    if len(parts) > 1:
        raise CheckpointError(
            f"engine {engine} is split over {len(parts)} model-parallel ranks; export cannot join "
            "its parts, because only the trial knows how it divides its weights"
        )


def _has_16bit_weights(module: Weights, engine: int, dtype: Precision) -> bool:
    """Whether the module has 16-bit weights.

    Raises:
        CheckpointError: it has none, and `dtype` asks for them.
    """
    has_16bit = any(each.dtype in _16BIT_TYPES for each in module.values())
    if dtype == "16bit" and not has_16bit:
        raise CheckpointError(
            f"engine {engine} was trained in fp32, and has no 16-bit weights: export with --dtype "
            "fp32, and convert the result"
        )
    return has_16bit


def _tensors(module: Mapping[str, Any]) -> Weights:
    others = sorted(name for name, value in module.items() if not isinstance(value, torch.Tensor))
    if others:
        _logger.warning("export skips entries that are not tensors: %s", ", ".join(others))
    return {name: value for name, value in module.items() if name not in others}


def _first_names(module: Weights, shared: Mapping[str, str]) -> dict[str, str]:
    """For each name, the first name of the same weights.

    Args:
        shared: DeepSpeed's list of tied parameters. Under ZeRO-3 it is the only source, since the
            module holds placeholders. Elsewhere tied names share their memory.
    """
    first: dict[Any, str] = {}
    names = {}
    for name, tensor in module.items():
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else name
        names[name] = first.setdefault(memory, name)
    for name, other in shared.items():
        if names.get(name) == name and other in names:
            names[name] = names[other]
    return names


def _copied(tensor: torch.Tensor, dtype: Precision) -> torch.Tensor:
    """A copy that owns its memory: `tensor` may be a view of a whole group of parameters."""
    target = _target_type(tensor.dtype, tensor.dtype, dtype)
    return tensor.detach().to(target, copy=True, memory_format=torch.contiguous_format)


def _target_type(stored: torch.dtype, computed: torch.dtype, dtype: Precision) -> torch.dtype:
    """The type to export: `stored` is the type in the file, `computed` the model's own."""
    if dtype == "16bit":
        return computed
    return torch.float32 if stored in _16BIT_TYPES else stored
