"""Exports an engine's weights from a checkpoint that DeepSpeed has written.

DeepSpeed's ``zero_to_fp32`` omits frozen weights under ZeRO-1, and the second name of a module
that its parent holds under two names. Here every name of the model's ``state_dict`` is exported:
from the optimizer's fp32 shards if they hold it, otherwise from the module's own state.

Reading constructs only tensors and plain data, unless the reader trusts the checkpoint.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from trial_core.controller.safe_load import Reader
from trial_core.deepspeed.checkpoint_engine import CHECKPOINT_CLASSES
from trial_core.deepspeed.export.consolidate import consolidated
from trial_core.deepspeed.reshard.parameter_state import MASTER, ParameterState
from trial_core.errors import CheckpointError
from trial_core.export.weights import (
    Precision,
    Weights,
    copied,
    first_names,
    has_16bit_weights,
    target_type,
    tensors_of,
)

_MODEL_STATES = re.compile(r"(zero_pp_rank_\d+_)?mp_rank_(\d+)_model_states\.pt")
_LAYER = re.compile(r"layer_(\d+)-(?:model_(\d+)-)?model_states\.pt")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)  # tied names have the same one
class SavedWeight:
    """A weight in a checkpoint's files.

    Attributes:
        shape: of the whole tensor.
        read: the whole tensor: contiguous, on the CPU, in its own memory.
    """

    shape: torch.Size
    read: Callable[[], torch.Tensor]


def export_weights(
    folder: Path, engine: int = 0, dtype: Precision = "fp32", reader: Reader | None = None
) -> Weights:
    """The weights and persistent buffers of one engine, by the names of its ``state_dict``.

    All tensors are contiguous, on the CPU, and own their memory; tied names map to one tensor.
    Called by one process; needs no other ranks. Arguments and errors: see `saved_weights`.
    """
    saved = saved_weights(folder, engine, dtype, reader)
    tensors = {weight: weight.read() for weight in dict.fromkeys(saved.values())}
    return {name: tensors[weight] for name, weight in saved.items()}


def saved_weights(
    folder: Path, engine: int = 0, dtype: Precision = "fp32", reader: Reader | None = None
) -> dict[str, SavedWeight]:
    """As `export_weights`, but a weight takes memory only when it is read.

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
    module = tensors_of(state["module"])
    has_16bit = has_16bit_weights(module, f"engine {engine}", dtype)
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
    first_name = first_names(module, shared)
    weights: dict[str, SavedWeight] = {}
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
            weights[name] = SavedWeight(saved.shape, partial(copied, saved, dtype))
        else:
            target = target_type(master.dtypes[MASTER], saved.dtype, dtype)
            weights[name] = SavedWeight(master.shape, partial(master.full_tensor, MASTER, target))
    return weights


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


def _pipeline_weights(
    files: list[Path], engine: int, dtype: Precision, reader: Reader
) -> dict[str, SavedWeight]:
    """A pipeline's weights, from one file for each layer.

    Names are those of a ``torch.nn.Sequential`` of the layers: ``0.weight``. DeepSpeed does not
    save which layers are tied, so each tied layer has its own, equal copy.
    """
    layers = {file: match for file in files if (match := _LAYER.fullmatch(file.name))}
    _refuse_model_parallel({match[2] for match in layers.values()}, engine)
    module: Weights = {}
    for file, match in sorted(layers.items(), key=lambda item: int(item[1][1])):
        named = tensors_of(reader.load_mapped(file)).items()
        module.update({f"{int(match[1])}.{name}": tensor for name, tensor in named})
    if has_16bit_weights(module, f"engine {engine}", dtype) and dtype == "fp32":
        raise CheckpointError(
            f"engine {engine} is a pipeline trained in 16 bits; export cannot consolidate its fp32 "
            "weights, which are in the optimizer state of every stage. Export with --dtype 16bit"
        )
    first_name, weights = first_names(module, {}), dict[str, SavedWeight]()
    for name, saved in module.items():
        tie = weights.get(first_name[name])
        weights[name] = tie or SavedWeight(saved.shape, partial(copied, saved, dtype))
    return weights


def _refuse_model_parallel(parts: Set[str | None], engine: int) -> None:
    if len(parts) > 1:
        raise CheckpointError(
            f"engine {engine} is split over {len(parts)} model-parallel ranks; export cannot join "
            "its parts, because only the trial knows how it divides its weights"
        )
