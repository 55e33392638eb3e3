"""Loads an engine from files that DeepSpeed has written: its whole state, or only the weights."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.engine import DeepSpeedEngine

from trial_core.deepspeed.checkpoint_engine import reader_of
from trial_core.deepspeed.export.engine_weights import export_weights
from trial_core.errors import CheckpointError, TrialError

_ZERO3_MODEL_STATES = re.compile(r"zero_pp_rank_.*_model_states\.pt")


def load_engine(engine: DeepSpeedEngine, folder: Path, tag: str) -> None:
    """Load an engine's whole state. Collective: every rank calls this.

    Raises:
        TrialError: DeepSpeed found no checkpoint of that tag.
    """
    path = None
    # Without files DeepSpeed's error would be "assert len(self.ckpt_list) > 0".
    if _has_model_states(folder, tag):
        path, _ = engine.load_checkpoint(str(folder), tag=tag, **_module_options(engine))
    if path is None:
        raise _not_found("checkpoint", tag, folder, "load")


def load_weights(engine: DeepSpeedEngine, folder: Path, tag: str) -> None:
    """Load only an engine's weights; optimizer and schedule stay as they are.

    The checkpoint may be of another number of data-parallel ranks, or another ZeRO stage. Under
    ZeRO-3 every rank temporarily holds the whole model in host memory. Collective: every rank calls
    this.

    Raises:
        TrialError: DeepSpeed found no weights of that tag.
    """
    if not _has_model_states(folder, tag):
        raise _not_found("weights", tag, folder, "load_weights")
    if not needs_optimizer_shards(engine, (file.name for file in (folder / tag).iterdir())):
        path, _ = engine.load_checkpoint(
            str(folder),
            tag=tag,
            load_module_only=True,
            load_optimizer_states=False,
            load_lr_scheduler_states=False,
            **_module_options(engine),
        )
        if path is None:
            raise _not_found("weights", tag, folder, "load_weights")
        return
    # DeepSpeed's own loading needs a shard for each present rank, and reads the tag saved last.
    weights = export_weights(folder, int(tag.removeprefix("model")), reader=reader_of(engine))
    if not engine.zero_optimization_partition_weights():
        engine.load_module_state_dict(checkpoint={"module": weights}, custom_load_fn=_load_module)
        if hasattr(engine.optimizer, "refresh_fp32_params"):
            engine.optimizer.refresh_fp32_params()
        return
    engine.optimizer.checkpoint_event_prologue()
    engine.load_module_state_dict(
        checkpoint={"module": weights}, custom_load_fn=_load_module, fetch_z3_params=True
    )
    engine.optimizer._restore_from_bit16_weights()
    engine.optimizer.checkpoint_event_epilogue()


def needs_optimizer_shards(engine: DeepSpeedEngine, names: Iterable[str]) -> bool:
    """Whether `load_weights` reads the optimizer's shards: if either side partitions the weights.

    Args:
        names: the files under the engine's tag.
    """
    is_saved_partitioned = any(_ZERO3_MODEL_STATES.fullmatch(name) for name in names)
    return is_saved_partitioned or bool(engine.zero_optimization_partition_weights())


def _module_options(engine: DeepSpeedEngine) -> dict[str, Any]:
    """Options of ``load_checkpoint`` for a checkpoint that may have no frozen weights."""
    if not _frozen(engine.module):
        return {}
    if isinstance(engine.module, PipelineModule):
        return {"load_module_strict": False}  # it loads its layers itself
    return {"custom_load_fn": _load_module}


def _load_module(src: Mapping[str, Any], dst: torch.nn.Module) -> None:
    """Load a module's state, from which all frozen parameters may be missing.

    Raises:
        CheckpointError: another parameter is missing, or there is one too many.
    """
    result = dst.load_state_dict(src, strict=False)
    missing, frozen = set(result.missing_keys), _frozen(dst)
    if frozen <= missing:
        missing -= frozen
    if missing or result.unexpected_keys:
        raise CheckpointError(
            "the checkpoint was saved by another model; missing in the checkpoint: "
            f"{_listed(missing)}; not in the model: {_listed(result.unexpected_keys)}"
        )


def _frozen(module: torch.nn.Module) -> set[str]:
    named = module.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if not parameter.requires_grad}


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _has_model_states(folder: Path, tag: str) -> bool:
    return any((folder / tag).glob("*_model_states.pt"))


def _not_found(content: str, tag: str, folder: Path, method: str) -> TrialError:
    return TrialError(
        f'DeepSpeed found no {content} (tag "{tag}") in {folder}; a trial that overrides save '
        f"must also override {method}"
    )
