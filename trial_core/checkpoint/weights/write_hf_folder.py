"""Writes folders that ``from_pretrained`` of ``transformers`` and ``peft`` open."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from trial_core.checkpoint.json_objects import decode_mapping
from trial_core.checkpoint.weights.model_files import HFFacts
from trial_core.checkpoint.weights.weights import SavedWeight
from trial_core.errors import CheckpointDamaged, CheckpointError, ConfigError, StorageError

_ADAPTER_CONFIG = "adapter_config.json"
_WEIGHTS = re.compile(r".*\.(safetensors|bin|h5|msgpack)(\.index\.json)?")
"""The names of files that ``from_pretrained`` reads weights of."""
_INSTALL = "install huggingface_hub: pip install 'trialflow[hf]'"


def write_model(
    weights: Mapping[str, SavedWeight], facts: HFFacts, files: Path, target: Path, shard_size: str
) -> list[str]:
    """Write a model's config, tokenizer and weights, one shard after the other; merge its adapter.
    Returns the names of the weights.

    Args:
        weights: of the trial's whole model, by its names.
        files: the folder of the Hugging Face files.
        target: an existing folder.
        shard_size: the size of the largest file: ``2GB``.

    Raises:
        CheckpointError: the adapter cannot be merged, or other files hold weights, or no config.
        ConfigError: ``huggingface_hub`` is not installed, or the size is not valid.
    """
    try:
        from huggingface_hub import split_state_dict_into_shards_factory
    except ImportError:
        raise ConfigError(f"--format hf needs huggingface_hub; {_INSTALL}") from None
    own = _of_model(weights, facts)
    if (files / _ADAPTER_CONFIG).exists():
        own = _merged(own, facts)
    stored = _without_ties(own, facts)
    try:
        split = split_state_dict_into_shards_factory(
            stored,
            get_storage_size=lambda weight: weight.shape.numel() * weight.dtype.itemsize,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=shard_size,
        )
    except ValueError as error:
        raise ConfigError(f"--max-shard-size {shard_size}: expected a size as 2GB") from error
    for name, names in split.filename_to_tensors.items():
        shard = {each: stored[each].read() for each in names}
        save_file(shard, target / name, metadata={"format": "pt"})
        del shard  # before the next one is read
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    _copy_files(files, target, but=_ADAPTER_CONFIG)
    _correct_config(target / "config.json", stored, facts)
    return list(stored)


def write_adapter(
    weights: Mapping[str, SavedWeight], facts: HFFacts, files: Path, target: Path
) -> list[str]:
    """Write an adapter alone, as ``PeftModel.save_pretrained`` does. See `write_model`. Raises
    CheckpointError if the model has no LoRA adapter."""
    if facts.adapter is None:
        found = f"an adapter that {facts.obstacle}" if facts.obstacle else "no adapter of peft"
        raise CheckpointError(f"the model has {found}; export one file: --to FILE.safetensors")
    own = _of_model(weights, facts)
    adapter = {saved: own[name].read() for name, saved in facts.adapter.items()}
    save_file(adapter, target / "adapter_model.safetensors", metadata={"format": "pt"})
    _copy_files(files, target, but=r"(generation_)?config\.json")
    return list(adapter)


def push(folder: Path, repository: str, message: str, without: str) -> str:
    """Upload a folder, without one of its files, to a hub, into a private repository if it is new.
    Returns its address. Raises ConfigError if ``huggingface_hub`` is not installed, StorageError if
    the hub refuses."""
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        raise ConfigError(f"--push-to needs huggingface_hub; {_INSTALL}") from None
    api = HfApi()
    try:
        repository = api.create_repo(repository, private=True, exist_ok=True).repo_id
        address = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message=message,
            ignore_patterns=[without],
        )
        return str(address)
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise StorageError(
            f"cannot upload {folder} to {repository}: {error}. The folder is complete; check "
            "HF_TOKEN and HF_ENDPOINT, then: hf upload"
        ) from error


def _of_model(weights: Mapping[str, SavedWeight], facts: HFFacts) -> dict[str, SavedWeight]:
    """The weights within Hugging Face's model, by its own names."""
    begin = facts.prefix
    return {name[len(begin) :]: each for name, each in weights.items() if name.startswith(begin)}


def _merged(own: Mapping[str, SavedWeight], facts: HFFacts) -> dict[str, SavedWeight]:
    """The base model's weights, with LoRA's products added, and modules that were trained whole."""
    adapter = {saved: name for name, saved in (facts.adapter or {}).items()}
    uses = Counter(own.values())
    merged: dict[str, SavedWeight] = {}
    for name, weight in own.items():
        layer, _, rest = name.rpartition(".base_layer.")
        if rest == "weight" and layer in facts.merged:
            if uses[weight] > 1:
                raise _not_merged(f"{layer} is tied to another layer")
            b, a = (own[adapter.pop(f"{layer}.lora_{each}.weight")] for each in "BA")
            read = partial(_sum, weight, b, a, *facts.merged[layer])
            merged[f"{layer}.weight"] = SavedWeight(weight.shape, weight.dtype, read)
        elif match := re.fullmatch(r"(.*\.)modules_to_save\.[^.]+\.(.*)", name):
            merged[match[1] + match[2]] = weight
            adapter.pop(match[1] + match[2], None)
        elif ".original_module." not in name and name not in (facts.adapter or {}):
            merged[name.replace(".base_layer.", ".")] = weight
    if adapter or facts.obstacle:
        raise _not_merged(facts.obstacle or f"{next(iter(adapter))} is not of LoRA's kind")
    return {name.removeprefix("base_model.model."): weight for name, weight in merged.items()}


def _sum(
    weight: SavedWeight, b: SavedWeight, a: SavedWeight, scale: float, is_transposed: bool
) -> torch.Tensor:
    """A layer's weight with scale * B @ A added, computed in fp32 as peft does on a CPU."""
    product = b.read().float() @ a.read().float()
    added = (product.T if is_transposed else product) * scale
    return weight.read().add_(added.to(weight.dtype))


def _not_merged(reason: str) -> CheckpointError:
    return CheckpointError(
        f"the adapter cannot be merged: {reason}; write it alone with --format adapter, and "
        "merge it with peft: PeftModel.from_pretrained(base, FOLDER).merge_and_unload()"
    )


def _without_ties(own: Mapping[str, SavedWeight], facts: HFFacts) -> dict[str, SavedWeight]:
    """The weights without the names that ``from_pretrained`` ties to others that are there. All
    weights if one is no longer tied: the config has one word for all ties."""
    uses = Counter(own.values())
    stored = {}
    for name, weight in own.items():
        if name not in facts.tied:
            stored[name] = weight
        elif uses[weight] > 1:
            uses[weight] -= 1
        else:
            return dict(own)
    return stored


def _copy_files(files: Path, target: Path, but: str) -> None:
    for file in files.iterdir():
        if re.fullmatch(rf"facts_\d+\.json|{but}", file.name):
            continue
        if _WEIGHTS.fullmatch(file.name):
            raise CheckpointError(
                f"{file.name} is beside the model's config, where no trial saves weights: the "
                "checkpoint may be hostile; export its own weights: --to model.safetensors"
            )
        if file.is_dir():  # a tokenizer may have several templates
            shutil.copytree(file, target / file.name)
        else:
            shutil.copyfile(file, target / file.name)


def _correct_config(file: Path, stored: Mapping[str, SavedWeight], facts: HFFacts) -> None:
    """Write the type of most weights into a config, and that a stored weight is not tied."""
    if not file.is_file():
        raise CheckpointDamaged(f"the checkpoint holds no {file.name} of its model")
    config = decode_mapping(file.read_bytes(), file.name)
    types = Counter(each.dtype for each in stored.values() if each.dtype.is_floating_point)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = str(max(types, key=types.__getitem__, default=torch.float32))[len("torch.") :]
    if any(name in facts.tied for name in stored):
        config["tie_word_embeddings"] = False  # an adapter has untied it
    file.write_text(json.dumps(config, indent=2) + "\n")
