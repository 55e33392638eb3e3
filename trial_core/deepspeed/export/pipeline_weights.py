"""Exports a pipeline's weights: a file for each layer, and the optimizer's shards of each stage.

DeepSpeed writes no file for a layer that uses another one's module with a function
(``TiedLayerSpec(…, forward_fn=…)``), and names tied weights by their key in the shards. The
checkpoint's `ModelFacts` tell which layers these are.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from deepspeed.pipe import PipelineModule, TiedLayerSpec

from trial_core.checkpoint.weights.model_files import facts_folder, read_facts
from trial_core.checkpoint.weights.weights import (
    Precision,
    SavedWeight,
    Weights,
    first_names,
    has_16bit_weights,
    tensors_of,
)
from trial_core.deepspeed.export.consolidate import consolidated, exported
from trial_core.deepspeed.reshard.parameter_state import ParameterState
from trial_core.deepspeed.reshard.saved_state import OPTIMIZER_STATES
from trial_core.errors import CheckpointError
from trial_core.rank.state_files.safe_load import Reader

LAYER = re.compile(r"layer_(\d+)-(?:model_(\d+)-)?model_states\.pt")
_TIED = re.compile(r"tied_modules\.([^.]+)\.(.*)")
_logger = logging.getLogger(__name__)


def tied_layers(model: object) -> dict[str, list[int]] | None:
    """The tied layers of a pipeline, by their key; None if `model` is not a pipeline."""
    if not isinstance(model, PipelineModule):
        return None
    tied: dict[str, list[int]] = {}
    for layer, spec in enumerate(model._layer_specs):
        if isinstance(spec, TiedLayerSpec):
            tied.setdefault(spec.key, []).append(layer)
    return tied


def layer_name(name: str, tied: Mapping[str, Sequence[int]] | None) -> str:
    """The exported name of a pipeline's parameter; of tied layers, the first's name.

    A key that is not in `tied` stays: ``tied_modules.key.weight``.
    """
    match = _TIED.fullmatch(name)
    return f"{tied[match[1]][0]}.{match[2]}" if match and tied and match[1] in tied else name


def not_joined(engine: int, parts: int) -> CheckpointError:
    """The error of a model that the trial itself has divided."""
    return CheckpointError(
        f"engine {engine} is split over {parts} model-parallel ranks; export cannot join "
        "its parts, because only the trial knows how it divides its weights"
    )


def pipeline_weights(
    folder: Path, engine: int, dtype: Precision, reader: Reader
) -> dict[str, SavedWeight]:
    """A pipeline's weights, by the names of a ``torch.nn.Sequential`` of its layers: ``0.weight``.

    Arguments and errors: see `saved_weights`.
    """
    tag, name = folder / f"model{engine}", f"engine {engine}"
    layers = {
        file: match for file in sorted(tag.iterdir()) if (match := LAYER.fullmatch(file.name))
    }
    if len(parts := {match[2] for match in layers.values()}) > 1:
        raise not_joined(engine, len(parts))
    tied = read_facts(folder / facts_folder(engine)).tied
    if tied is None:
        _logger.warning(
            f"the checkpoint does not record which layers of {name} are tied: a layer that uses "
            "another one's weights with a forward_fn is missing in the export"
        )
    module: Weights = {}
    for file, match in sorted(layers.items(), key=lambda item: int(item[1][1])):
        named = tensors_of(reader.load_mapped(file)).items()
        module.update({f"{int(match[1])}.{each}": tensor for each, tensor in named})
    masters: Mapping[str, ParameterState] = {}
    if has_16bit_weights(module, name, dtype) and dtype == "fp32":
        masters = _masters(tag, name, tied, reader)
    weights: dict[str, SavedWeight] = {}
    for each, first in first_names(module, {}).items():
        own = exported(module[each], masters.get(each), dtype)
        weights[each] = weights.get(first, own)
    return _with_ties(weights, (tied or {}).values())


def _masters(
    tag: Path, name: str, tied: Mapping[str, Sequence[int]] | None, reader: Reader
) -> dict[str, ParameterState]:
    """The fp32 weights of all stages, by the names of the layers' weights."""
    shards = (OPTIMIZER_STATES.fullmatch(file.name) for file in tag.iterdir())
    stages = sorted({int(match[2]) for match in shards if match})
    if not stages:
        _logger.warning(
            f"the checkpoint of {name} has no fp32 weights: the exported fp32 weights are "
            "converted from 16 bits"
        )
    found: dict[str, ParameterState] = {}
    for stage in stages:
        for each, master in consolidated(tag, reader.load_mapped, stage).items():
            layer = layer_name(each, tied)
            if layer.startswith("tied_modules."):
                raise CheckpointError(
                    f"{name} has tied layers ({each}), and its checkpoint does not record which: "
                    "export with --dtype 16bit, or save a checkpoint with this version of trialflow"
                )
            found.setdefault(layer, master)
    return found


def _with_ties(
    weights: Mapping[str, SavedWeight], tied: Iterable[Sequence[int]]
) -> dict[str, SavedWeight]:
    """`weights`, with the first of each group of tied layers under the names of all."""
    found = dict(weights)
    for first, *others in tied:
        for name, weight in weights.items():
            layer, _, rest = name.partition(".")
            if int(layer) == first:
                found.update({f"{other}.{rest}": weight for other in others})
    return dict(sorted(found.items(), key=lambda item: int(item[0].partition(".")[0])))
