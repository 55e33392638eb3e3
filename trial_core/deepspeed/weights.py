"""An engine out of a checkpoint that DeepSpeed has written: whole, or the weights alone."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.engine import DeepSpeedEngine

from trial_core.deepspeed.export.weights_file import export_weights
from trial_core.deepspeed.shard_files import reader_of
from trial_core.errors import CheckpointError, TrialError

_PART = re.compile(r"zero_pp_rank_.*_model_states\.pt")
"""A rank's part of the weights, which ZeRO-3 cuts."""


def load_engine(engine: DeepSpeedEngine, folder: Path, tag: str) -> None:
    """Load all of an engine's state. Collective: every rank calls this.

    Raises:
        TrialError: DeepSpeed found no checkpoint of that tag.
    """
    path = None
    # DeepSpeed itself would say no more than "assert len(self.ckpt_list) > 0".
    if _is_there(folder, tag):
        path, _ = engine.load_checkpoint(str(folder), tag=tag, **_without_frozen(engine))
    if path is None:
        raise TrialError(
            f'DeepSpeed found no checkpoint (tag "{tag}") in {folder}; a trial that overrides save '
            "overrides load as well"
        )


def load_weights(engine: DeepSpeedEngine, folder: Path, tag: str) -> None:
    """Load an engine's weights alone; optimizer and schedule stay as they are.

    The checkpoint may be from another number of data-parallel ranks or another ZeRO stage. Under
    ZeRO-3 every rank has the whole model in host memory for a moment. Collective: every rank calls
    this.

    Raises:
        TrialError: DeepSpeed found no weights of that tag.
    """
    if not _is_there(folder, tag):
        raise _no_weights(folder, tag)
    into_parts = engine.zero_optimization_partition_weights()
    if not reads_shards(engine, (file.name for file in (folder / tag).iterdir())):
        path, _ = engine.load_checkpoint(
            str(folder),
            tag=tag,
            load_module_only=True,
            load_optimizer_states=False,
            load_lr_scheduler_states=False,
            **_without_frozen(engine),
        )
        if path is None:
            raise _no_weights(folder, tag)
        return
    # DeepSpeed's own way looks for a shard of each present rank, and for the tag saved last.
    weights = export_weights(folder, int(tag.removeprefix("model")), reader=reader_of(engine))
    if not into_parts:
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


def reads_shards(engine: DeepSpeedEngine, names: Iterable[str]) -> bool:
    """Whether `load_weights` puts the weights together out of the optimizer's shards.

    Args:
        names: of the files that DeepSpeed has saved under the engine's tag.
    """
    from_parts = any(_PART.fullmatch(name) for name in names)
    return from_parts or bool(engine.zero_optimization_partition_weights())


def _without_frozen(engine: DeepSpeedEngine) -> dict[str, Any]:
    """How DeepSpeed is to load a module from a checkpoint that may have left out frozen weights."""
    if not _frozen(engine.module):
        return {}
    if isinstance(engine.module, PipelineModule):
        return {"load_module_strict": False}  # it loads layers by itself
    return {"custom_load_fn": _load_module}


def _load_module(src: Mapping[str, Any], dst: torch.nn.Module) -> None:
    """Load a module's state, in which all or none of the frozen parameters may be missing.

    Raises:
        CheckpointError: something else is missing, or is too much.
    """
    result = dst.load_state_dict(src, strict=False)
    missing, frozen = set(result.missing_keys), _frozen(dst)
    if frozen <= missing:
        missing -= frozen
    if missing or result.unexpected_keys:
        raise CheckpointError(
            f"the checkpoint is not of this model: it lacks {_listed(missing)}, and has besides "
            f"{_listed(result.unexpected_keys)}"
        )


def _frozen(module: torch.nn.Module) -> set[str]:
    named = module.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if not parameter.requires_grad}


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _is_there(folder: Path, tag: str) -> bool:
    """Whether `folder` has a checkpoint that DeepSpeed has saved under that tag."""
    return any((folder / tag).glob("*_model_states.pt"))


def _no_weights(folder: Path, tag: str) -> TrialError:
    return TrialError(
        f'DeepSpeed found no weights (tag "{tag}") in {folder}; a trial that overrides save '
        "overrides load_weights as well"
    )
