"""Frozen weights of a checkpoint, in files of their own.

Frozen weights do not change, so all checkpoints of a trial share one such file. It is next to the
file that would hold them: ``state_dict_frozen.pth`` next to ``state_dict.pth``. There, tensors
without data (on the device "meta") are their placeholders. A `Reader` joins the two.

Equal tensors give equal files: torch writes neither times nor addresses, and equal names of
tensors are one object, which decides how a pickle refers to them.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

KeyPath = tuple[Hashable, ...]
"""Where a tensor is in a state: ``("models_state_dict", 0, "0.weight")``."""

_SUFFIX = "_frozen"


def frozen_path(path: Path) -> Path:
    """The file of the frozen weights that the file at `path` would hold."""
    return path.with_name(f"{path.stem}{_SUFFIX}{path.suffix}")


def is_frozen_path(path: Path) -> bool:
    """Return whether this file holds the frozen weights of the file next to it."""
    return path.stem.endswith(_SUFFIX) and path.with_stem(path.stem[: -len(_SUFFIX)]).is_file()


def frozen_names(module: nn.Module, *, every_name: bool = True) -> set[str]:
    """The names of all parameters that are not trained; of tied ones every name, or the first."""
    named = module.named_parameters(remove_duplicate=not every_name)
    return {name for name, parameter in named if not parameter.requires_grad}


def without_frozen(
    state: Mapping[str, Any], frozen: Iterable[KeyPath]
) -> tuple[dict[str, Any], dict[KeyPath, torch.Tensor]]:
    """`state` with placeholders for its frozen weights, and these."""
    names = {
        keys: tuple(sys.intern(k) if isinstance(k, str) else k for k in keys) for keys in frozen
    }
    taken: dict[KeyPath, torch.Tensor] = {}

    def take_out(keys: KeyPath, tensor: torch.Tensor) -> torch.Tensor:
        if keys not in names or tensor.is_meta or tensor.numel() == 0:
            return tensor
        taken[names[keys]] = tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    return (replaced(dict(state), take_out), taken) if names else (dict(state), taken)


def with_frozen(state: Any, frozen: Mapping[KeyPath, torch.Tensor]) -> Any:
    """Undo `without_frozen`."""
    return replaced(state, lambda keys, tensor: frozen.get(keys, tensor))


def replaced(
    value: Any, replace: Callable[[KeyPath, torch.Tensor], torch.Tensor], keys: KeyPath = ()
) -> Any:
    """A copy of nested dicts, lists and tuples in which every tensor is replaced."""
    if isinstance(value, torch.Tensor):
        return replace(keys, value)
    if isinstance(value, dict):
        copied = copy.copy(value)  # keeps the versions that a module's state_dict carries
        for key, item in value.items():
            copied[key] = replaced(item, replace, (*keys, key))
        return copied
    if type(value) in (list, tuple):
        return type(value)(replaced(item, replace, (*keys, i)) for i, item in enumerate(value))
    return value
