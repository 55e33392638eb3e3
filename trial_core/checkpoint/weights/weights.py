"""The weights of a model by name: their ties, their precision, and the file that holds them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from trial_core.errors import CheckpointError, StorageError

Weights = dict[str, torch.Tensor]
Precision = Literal["fp32", "16bit"]

_16BIT_TYPES = (torch.float16, torch.bfloat16)
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)  # tied names have the same one
class SavedWeight:
    """A weight in a checkpoint's files: its whole shape, and the type with which it is read. `read`
    returns the whole tensor: contiguous, on the CPU, in its own memory."""

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


def read_all(saved: Mapping[str, SavedWeight]) -> Weights:
    """All weights in memory; tied names map to one tensor."""
    tensors = {weight: weight.read() for weight in dict.fromkeys(saved.values())}
    return {name: tensors[weight] for name, weight in saved.items()}


def has_16bit_weights(module: Weights, name: str, dtype: Precision) -> bool:
    """Return whether a module has 16-bit weights. Raises CheckpointError if it has none, and
    `dtype` asks for them."""
    has_16bit = any(each.dtype in _16BIT_TYPES for each in module.values())
    if dtype == "16bit" and not has_16bit:
        raise CheckpointError(
            f"{name} was trained in fp32, and has no 16-bit weights: export with --dtype fp32, and "
            "convert the result"
        )
    return has_16bit


def tensors_of(module: Mapping[str, Any]) -> Weights:
    """The tensors of a ``state_dict``; warns about entries that are not tensors."""
    others = sorted(name for name, value in module.items() if not isinstance(value, torch.Tensor))
    if others:
        _logger.warning("export skips entries that are not tensors: %s", ", ".join(others))
    return {name: value for name, value in module.items() if name not in others}


def first_names(module: Weights, shared: Mapping[str, str]) -> dict[str, str]:
    """For each name, the first name of the same weights, which share their memory. `shared` is
    DeepSpeed's list of tied parameters: under ZeRO-3 the only source, since the module holds
    placeholders."""
    first: dict[Any, str] = {}
    names = {}
    for name, tensor in module.items():
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else name
        names[name] = first.setdefault(memory, name)
    for name, other in shared.items():
        if names.get(name) == name and other in names:
            names[name] = names[other]
    return names


def saved_weight(tensor: torch.Tensor, dtype: Precision) -> SavedWeight:
    """A tensor of a file, as a weight. `tensor` may be a view of a whole group of parameters."""
    target = target_type(tensor.dtype, tensor.dtype, dtype)
    own = {"copy": True, "memory_format": torch.contiguous_format}
    return SavedWeight(tensor.shape, target, partial(tensor.detach().to, target, **own))


def saved_all(module: Weights, dtype: Precision) -> dict[str, SavedWeight]:
    """`saved_weight` for all tensors of a module; names that share memory have the same one."""
    weights: dict[str, SavedWeight] = {}
    for name, first in first_names(module, {}).items():
        weights[name] = weights[first] if first in weights else saved_weight(module[name], dtype)
    return weights


def target_type(stored: torch.dtype, computed: torch.dtype, dtype: Precision) -> torch.dtype:
    """The type to export: `stored` is the type in the file, `computed` the model's own."""
    if dtype == "16bit":
        return computed
    return torch.float32 if stored in _16BIT_TYPES else stored


def write_weights(weights: Weights, target: Path, facts: Mapping[str, str]) -> None:
    """Write weights to a safetensors file; with any other suffix, with ``torch.save``. Raises
    StorageError if the file cannot be written.

    safetensors stores one copy of tied weights, under the first of their names. The metadata maps
    each other name to the first, as ``safetensors.torch.save_model`` does, so that ``load_model``
    ties them again; it also has the `facts`. ``torch.save`` keeps the tie itself.
    """
    first: dict[int, str] = {}
    for name, tensor in weights.items():
        first.setdefault(id(tensor), name)
    stored = {name: weights[name] for name in first.values()}
    tied = {name: first[id(each)] for name, each in weights.items() if name not in stored}
    try:
        if target.suffix == ".safetensors":
            save_file(stored, target, metadata={**facts, **tied, "format": "pt"})
        else:
            torch.save(weights, target)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise StorageError(f"cannot write {target}: {error}; free space in its folder") from error
