"""Reads weights that another program has written.

`checkpoint.transfer.import_checkpoint` has copied them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from trial_core.checkpoint import layout
from trial_core.errors import CheckpointDamaged, CheckpointError
from trial_core.rank.state_files.compiled_names import COMPILED
from trial_core.rank.state_files.safe_load import Reader

_STATE_KEYS = ("state_dict", "model_state_dict", "module", "model")


def imported_weights(
    folder: Path, own: Collection[str], reader: Reader
) -> dict[str, torch.Tensor] | None:
    """The weights by name, still in their files; None if the checkpoint is a trial's own.

    Args:
        folder: a checkpoint's verified files.
        own: the names in the model's ``state_dict``. Another prefix of all saved names, such as
            ``module.`` or ``model.``, is replaced by the model's.

    Raises:
        CheckpointDamaged: a file is incomplete.
        CheckpointError: a file has no weights, or objects that the reader does not trust.
    """
    root = folder / layout.IMPORTED
    if not root.is_dir():
        return None
    weights: dict[str, torch.Tensor] = {}
    # Sorted: weights in DeepSpeed's folder zero/ replace the same names in its model states.
    for file in sorted(each for each in root.rglob("*") if each.is_file()):
        path = file.relative_to(root).as_posix()
        if file.suffix == ".safetensors":
            weights |= _safetensors(file)
        elif path.startswith("zero/"):  # DeepSpeed's universal form: a folder for each parameter
            saved = reader.load_mapped(file)
            if not isinstance(saved, Mapping) or not isinstance(saved.get("param"), torch.Tensor):
                raise CheckpointError(f"{path} holds no weight: expected a tensor under param")
            weights[Path(path).parent.name] = saved["param"]
        elif file.name.endswith("_model_states.pt"):  # next to zero/, with ZeRO-3's placeholders
            state = _state_of(reader.load_mapped(file), path)
            weights |= {name: each for name, each in state.items() if each.numel()}
        else:
            weights |= _state_of(reader.load_mapped(file), path)
    return _renamed(weights, own)


def _safetensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(file)
    except SafetensorError as error:
        raise CheckpointDamaged(f"{file.name} is no intact safetensors file: {error}") from error


def _state_of(content: Any, path: str) -> dict[str, torch.Tensor]:
    """The ``state_dict`` in a file: all of it, or one of its entries. Raises CheckpointError."""
    if isinstance(content, Mapping):
        tensors = {name: each for name, each in content.items() if isinstance(each, torch.Tensor)}
        for key in _STATE_KEYS:
            if isinstance(content.get(key), Mapping):
                return _state_of(content[key], path)
        if tensors:
            return tensors
    seen = sorted(map(str, content)) if isinstance(content, Mapping) else type(content).__name__
    raise CheckpointError(
        f"{path} holds no weights: expected tensors by name, or these under one of "
        f"{', '.join(_STATE_KEYS)}; got {seen}"
    )


def _renamed(weights: Mapping[str, torch.Tensor], own: Collection[str]) -> dict[str, torch.Tensor]:
    """`weights` with the model's prefix, if all of them are then names of the model.

    Raises:
        CheckpointError: several prefixes fit; the same on every rank.
    """
    weights = {name.replace(COMPILED, ""): tensor for name, tensor in weights.items()}
    names = set(own)
    if not weights or weights.keys() <= names:
        return dict(weights)
    first = min(weights)
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name in sorted(names):
        if name.endswith(f".{first}"):
            prefix = name.removesuffix(first)
            if all(f"{prefix}{each}" in names for each in weights):
                found[prefix] = {f"{prefix}{each}": tensor for each, tensor in weights.items()}
        if first.endswith(f".{name}"):
            prefix = first.removesuffix(name)
            if all(each.startswith(prefix) and each[len(prefix) :] in names for each in weights):
                found[prefix] = {each[len(prefix) :]: each_of for each, each_of in weights.items()}
    if len(found) > 1:
        raise CheckpointError(
            f"the weights fit under several prefixes of the model's names: {', '.join(found)}; "
            "load them in the trial's load_weights, or name them as the model does"
        )
    return next(iter(found.values()), dict(weights))
