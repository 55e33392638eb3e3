"""A model's facts in a checkpoint, in addition to its weights, so that export needs no ranks.

The folder ``export{index}`` of a checkpoint holds `ModelFacts` of each model-parallel rank. For a
Hugging Face model, it also holds the other files that ``from_pretrained`` reads.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from trial_core.common.decoding import decode
from trial_core.errors import CheckpointError

_BEYOND_LORA = ("lora_variant", "use_dora", "lora_bias")
"""Attributes of peft's layers that show, by adapter, if they compute more than B @ A."""

_OF_ADAPTERS = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+|_orig_mod)(?=\.)")
"""The parts that peft and torch.compile add to the names of a model's own parameters."""


@dataclass(frozen=True)
class HFFacts:
    """Facts about a model of ``transformers``, bare or in a ``peft.PeftModel``.

    Attributes:
        prefix: prefix of the model's names in the trial's ``state_dict``.
        tied: the names that ``from_pretrained`` ties to others.
        adapter: the names of an adapter's weights in peft's files, by their names in the model.
        merged: of each layer that LoRA adapts, the scale of B @ A, and whether it is transposed.
        obstacle: why the adapter cannot be merged.
    """

    prefix: str = ""
    tied: Sequence[str] = field(default_factory=list)
    adapter: Mapping[str, str] | None = None
    merged: Mapping[str, tuple[float, bool]] = field(default_factory=dict)
    obstacle: str | None = None


@dataclass(frozen=True)
class ModelFacts:
    """A rank's facts about a model when it saves: the names of the parameters that are not trained,
    and the layers of a pipeline with the same weights, by their key; None without a pipeline."""

    frozen: Sequence[str] = field(default_factory=list)
    tied: Mapping[str, Sequence[int]] | None = None
    hf: HFFacts | None = None


def facts_folder(index: int) -> str:
    """The folder of an engine's facts, or of a PyTorchTrial's model, in a checkpoint."""
    return f"export{index}"


def write_facts(
    model: nn.Module,
    target: Path,
    tokenizer_files: Mapping[str, bytes],
    rank: int = 0,
    tied: Mapping[str, Sequence[int]] | None = None,
    renamed: Callable[[str], str] = str,
) -> None:
    """Write the facts about a model, if any, to the `facts_folder` in the staging folder, with
    `tokenizer_files` by their paths below it. Called by one rank of each part of the model, with
    its model-parallel `rank`: the first one writes the Hugging Face files. `renamed`: the exported
    name of a parameter."""
    named = model.named_parameters(remove_duplicate=False)
    frozen = [renamed(name) for name, parameter in named if not parameter.requires_grad]
    facts = ModelFacts(
        frozen, tied, None if rank else _write_hf_files(model, target, tokenizer_files)
    )
    if facts != ModelFacts():
        target.mkdir(exist_ok=True)
        (target / f"facts_{rank:02d}.json").write_text(json.dumps(asdict(facts)))


def read_facts(source: Path) -> ModelFacts:
    """The facts of all model-parallel ranks, in the `facts_folder` `source`, which may be missing.
    Raises CheckpointError if a file does not have these facts."""
    found = []
    for file in sorted(source.glob("facts_*.json")):
        try:
            found.append(decode(file.read_bytes(), ModelFacts))
        except msgspec.MsgspecError as error:
            raise CheckpointError(f"{file.name} does not have a model's facts: {error}") from error
    return ModelFacts(
        list(dict.fromkeys(name for each in found for name in each.frozen)),
        next((each.tied for each in found if each.tied is not None), None),
        next((each.hf for each in found if each.hf), None),
    )


def _write_hf_files(
    module: nn.Module, target: Path, tokenizer_files: Mapping[str, bytes]
) -> HFFacts | None:
    """Write config, generation config, adapter config and tokenizer, as far as there are any."""
    # Never imported here: a trial that has such a model has imported them.
    adapted = getattr(sys.modules.get("peft"), "PeftModel", ())
    pretrained = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())
    models = (each for each in module.named_modules() if isinstance(each[1], (adapted, pretrained)))
    prefix, model = next(models, ("", None))
    if model is None:
        return None
    target.mkdir(exist_ok=True)
    is_adapted = isinstance(model, adapted)
    base: Any = model.get_base_model() if is_adapted else model
    config = copy.deepcopy(base.config)
    config.architectures = [type(base).__name__]
    config.to_json_file(target / "config.json")
    if getattr(base, "generation_config", None) is not None:
        base.generation_config.to_json_file(target / "generation_config.json")
    for path, content in tokenizer_files.items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_bytes(content)
    tied = getattr(base, "all_tied_weights_keys", None) or getattr(base, "_tied_weights_keys", None)
    named = {
        _OF_ADAPTERS.sub("", each): None
        for each in dict(base.named_parameters(remove_duplicate=False))
    }
    # Not the patterns themselves: a search for a stranger's may not end.
    names = [each for each in named if any(re.search(pattern, each) for pattern in tied or ())]
    facts = HFFacts(f"{prefix}." if prefix else "", names)
    return _with_adapter(facts, model, target) if is_adapted else facts


def _with_adapter(facts: HFFacts, model: Any, target: Path) -> HFFacts:
    """The facts of a ``PeftModel``, whose active adapter's config is written."""
    from peft import get_peft_model_state_dict
    from peft.tuners.lora import Linear, LoraLayer

    active = model.active_adapter
    config = copy.deepcopy(model.peft_config[active])
    config.inference_mode = True
    config.save_pretrained(target)
    if config.peft_type != "LORA":  # peft computes some others when it saves
        return replace(facts, obstacle=f"is of the kind {config.peft_type}, not of LoRA's")
    names = {name: name for name in model.state_dict()}
    adapter = get_peft_model_state_dict(model, names, active, save_embedding_layers=False)
    merged, obstacle = {}, "the model has several adapters" if len(model.peft_config) > 1 else None
    for path, layer in model.named_modules():
        if isinstance(layer, LoraLayer) and active in layer.scaling:
            kinds = (getattr(layer, kind, {}) for kind in _BEYOND_LORA)
            if type(layer) is Linear and not any(each.get(active) for each in kinds):
                merged[path] = (layer.scaling[active], layer.fan_in_fan_out)
            else:
                obstacle = f"{path} is no plain layer of LoRA"
    own = {name: saved for saved, name in adapter.items()}
    return replace(facts, adapter=own, merged=merged, obstacle=obstacle)
