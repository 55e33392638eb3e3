"""Loads an engine from files that DeepSpeed has written: its whole state, or only the weights."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import GatheredParameters

from trial_core.checkpoint.weights.weights import SavedWeight
from trial_core.deepspeed.checkpoint_engine import reader_of
from trial_core.deepspeed.export.engine_weights import saved_weights
from trial_core.deepspeed.reshard.saved_state import MODEL_STATES
from trial_core.deepspeed.validated_weights import read_validated
from trial_core.errors import CheckpointError, TrialError
from trial_core.rank.state_files.frozen_files import frozen_names
from trial_core.rank.state_files.read_imported_weights import imported_weights

_logger = logging.getLogger(__name__)

_OF_PRECISION = frozenset(
    {"optimizer_state_dict", "param_groups", "dynamic_loss_scale", "cur_scale"}
)
"""What an optimizer's state without ZeRO has either in 16 bits or in fp32 alone."""


def load_engine(engine: DeepSpeedEngine, folder: Path, tag: str) -> None:
    """Load an engine's whole state. Collective: every rank calls this.

    Raises TrialError if DeepSpeed finds no checkpoint of that tag, and CheckpointError if it saved
    one in another precision without ZeRO.
    """
    try:
        with _secondary_copies_renewed(engine):
            _load_checkpoint(engine, folder, tag, "load")
    except KeyError as error:
        if engine.zero_optimization() or error.args[0] not in _OF_PRECISION:
            raise
        raise CheckpointError(
            f"{tag} of the checkpoint has no {error} for DeepSpeed's "
            f"{type(engine.optimizer).__name__}: without ZeRO, its state in 16 bits differs from "
            "that in fp32. Resume in the precision (bf16, fp16 or fp32) that saved the checkpoint, "
            "or load only the weights: searcher.source_weights_only=true"
        ) from error


def load_weights(engine: DeepSpeedEngine, folder: Path, tag: str) -> None:
    """Load only an engine's weights; optimizer and schedule stay as they are.

    The checkpoint may be of another number of data-parallel ranks, or another ZeRO stage. The
    module is loaded part by part: under ZeRO-3, the device and the first rank's host memory hold no
    more than the rank's own weights and one part's. Collective: every rank calls this. Raises
    TrialError if DeepSpeed finds no weights of that tag, and CheckpointError if they are another
    model's.
    """
    imported = imported_weights(folder, engine.module.state_dict().keys(), reader_of(engine))
    if imported is not None and tag != "model0":
        raise CheckpointError(
            "imported weights are of one model, and the trial has several engines: load them in a "
            "load_weights method of the trial"
        )
    if imported is not None:
        weights = _as_saved(imported)
        _load_by_parts(engine, weights)
        missing = frozen_names(engine.module, every_name=False) - weights.keys()
        if missing and dist.get_rank() == 0:
            _logger.warning(
                "%d frozen weights are not in the imported files, and stay as the trial has built "
                "them: %s", len(missing), _listed(sorted(missing)[:5]),
            )  # fmt: skip
        return
    names = [file.name for file in (folder / tag).glob("*")]
    if _has_model_states(folder, tag) and needs_optimizer_shards(engine, names):
        # DeepSpeed's own loading needs a shard for each present rank, and reads the tag saved last.
        # Under ZeRO-3 it also has the whole model on every device, and in every rank's host memory.
        index = int(tag.removeprefix("model"))
        _load_by_parts(engine, saved_weights(folder, index, "fp32", reader_of(engine)))
    else:
        parts = ("load_optimizer_states", "load_lr_scheduler_states")
        options = {"load_module_only": True, **dict.fromkeys(parts, False)}
        _load_checkpoint(engine, folder, tag, "load_weights", **options)


def load_validated(engine: DeepSpeedEngine, folder: Path, index: int) -> None:
    """Load the weights that validations saw, if the checkpoint's are others. Collective.

    Raises CheckpointError if the weights are another model's.
    """
    if saved := read_validated(folder, index, reader_of(engine)):
        _load_by_parts(engine, _as_saved(saved), has_all=False)


def _as_saved(tensors: Mapping[str, torch.Tensor]) -> dict[str, SavedWeight]:
    return {name: SavedWeight(each.shape, each.dtype, each.clone) for name, each in tensors.items()}


def _load_by_parts(
    engine: DeepSpeedEngine, weights: Mapping[str, SavedWeight], has_all: bool = True
) -> None:
    """`load_by_parts`, and the optimizer's own copies of the weights."""
    if not engine.zero_optimization_partition_weights():
        load_by_parts(engine.module, weights, has_all)
        if hasattr(engine.optimizer, "refresh_fp32_params"):
            engine.optimizer.refresh_fp32_params()
        return
    engine.optimizer.checkpoint_event_prologue()
    load_by_parts(engine.module, weights, has_all)
    engine.optimizer._restore_from_bit16_weights()
    with _secondary_copies_renewed(engine):
        engine.optimizer.checkpoint_event_epilogue()


@contextmanager
def _secondary_copies_renewed(engine: DeepSpeedEngine) -> Iterator[None]:
    """Inside the block, loaded weights also replace the secondary copies that hpZ keeps of them.

    DeepSpeed forgets only the copies of trained weights: a frozen weight would stay as it was
    built.
    """
    if not hasattr(engine.optimizer, "invalidate_secondary_tensor"):
        yield
        return

    def forget() -> None:
        for parameter in engine.module.parameters():
            if hasattr(parameter, "ds_secondary_tensor"):
                parameter.ds_secondary_tensor = None

    engine.optimizer.invalidate_secondary_tensor = forget
    try:
        yield
    finally:
        del engine.optimizer.invalidate_secondary_tensor


def needs_optimizer_shards(engine: DeepSpeedEngine, names: Iterable[str]) -> bool:
    """True if `load_weights` reads the optimizer's shards: if either side partitions the weights.

    `names` are the files under the engine's tag.
    """
    matches = map(MODEL_STATES.fullmatch, names)
    is_saved_partitioned = any(match and match[1] is not None for match in matches)
    return is_saved_partitioned or bool(engine.zero_optimization_partition_weights())


def _load_checkpoint(
    engine: DeepSpeedEngine, folder: Path, tag: str, method: str, **options: Any
) -> None:
    """Have DeepSpeed load a checkpoint of `save_checkpoint`, for the trial's `method`.

    With ``checkpoint.load_universal``, which is for a checkpoint that the trial loads itself,
    DeepSpeed would look for a universal one here, too. Raises TrialError if it finds none.
    """
    config, module = engine._config, engine.module
    if isinstance(module, PipelineModule):  # it loads its layers itself
        options["load_module_strict"] = not frozen_names(module)
    elif frozen_names(module):
        options["custom_load_fn"] = _load_module
    is_universal, config.load_universal_checkpoint = config.load_universal_checkpoint, False
    path = None
    try:
        # Without files DeepSpeed's error would be "assert len(self.ckpt_list) > 0".
        if _has_model_states(folder, tag):
            path, _ = engine.load_checkpoint(str(folder), tag=tag, **options)
    finally:
        config.load_universal_checkpoint = is_universal
    if path is None:
        content = "checkpoint" if method == "load" else "weights"
        raise TrialError(
            f'DeepSpeed found no {content} (tag "{tag}") in {folder}; a trial that overrides save '
            f"must also override {method}"
        )


def load_by_parts(
    module: torch.nn.Module, weights: Mapping[str, SavedWeight], has_all: bool = True
) -> None:
    """Load a module's weights, each submodule's own after the other's.

    Without `has_all`, weights that are missing stay as they are.

    ZeRO-3's parameters are gathered for that. The first of the ranks that share them reads them;
    the others receive them. Collective: every rank calls this. Raises CheckpointError if the
    weights are another model's; raised on every rank, before any is read.
    """
    own = _state_tensors(module)
    _require_same_model(module, own, weights, has_all)
    saved = {id(tensor): weights[name] for name, tensor in own.items() if name in weights}
    for part in module.modules():
        parameters = list(part.parameters(recurse=False))
        with GatheredParameters(parameters, modifier_rank=0):
            for tensor in (*parameters, *part.buffers(recurse=False)):
                if id(tensor) in saved and _is_read_here(tensor):
                    tensor.data.copy_(saved[id(tensor)].read())


def _is_read_here(tensor: torch.Tensor) -> bool:
    """True if this rank reads a weight, not another one that sends it."""
    sharing = getattr(tensor, "ds_process_group", None)  # under ZeRO-3
    return sharing is None or dist.get_rank(group=sharing) == 0


def _state_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a module by their names in its ``state_dict``.

    Raises CheckpointError if a hook of the module's puts other tensors there.
    """
    state = module.state_dict(keep_vars=True).items()
    found = {name: value for name, value in state if isinstance(value, torch.Tensor)}
    own = {id(each) for each in (*module.parameters(), *module.buffers())}
    if others := [name for name, tensor in found.items() if id(tensor) not in own]:
        raise CheckpointError(
            f"the model's state_dict has tensors that are not its own: {_listed(others)}; "
            "load the weights in a load_weights method of the trial"
        )
    return found


def _load_module(src: Mapping[str, Any], dst: torch.nn.Module) -> None:
    """Load a module's state, from which all frozen parameters may be missing."""
    result = dst.load_state_dict(src, strict=False)
    _require_same_names(dst, set(result.missing_keys), result.unexpected_keys)


def _require_same_model(
    module: torch.nn.Module,
    own: Mapping[str, torch.Tensor],
    weights: Mapping[str, SavedWeight],
    has_all: bool,
) -> None:
    """Check the names and shapes of saved weights. Raises CheckpointError if they differ."""
    saved = {id(own[name]) for name in own.keys() & weights.keys()}
    missing = {name for name, tensor in own.items() if id(tensor) not in saved}  # none that is tied
    _require_same_names(module, missing if has_all else set(), weights.keys() - own.keys())
    shapes = {name: getattr(each, "ds_shape", each.shape) for name, each in own.items()}
    for name, weight in weights.items():
        if weight.shape != shapes[name]:
            raise CheckpointError(
                f"the weights {name} have the shape {tuple(weight.shape)} in the checkpoint, and "
                f"{tuple(shapes[name])} in the model; load the weights of the same model"
            )


def _require_same_names(
    module: torch.nn.Module, missing: Set[str], unexpected: Collection[str]
) -> None:
    """Check that a checkpoint lacks nothing but, perhaps, all of the frozen parameters.

    Raises CheckpointError, which names what else differs.
    """
    # DeepSpeed leaves a frozen parameter out by its first name only.
    if frozen_names(module, every_name=False) <= missing:
        missing = missing - frozen_names(module)
    if missing or unexpected:
        raise CheckpointError(
            "the checkpoint was saved by another model; missing in the checkpoint: "
            f"{_listed(missing)}; not in the model: {_listed(unexpected)}"
        )


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _has_model_states(folder: Path, tag: str) -> bool:
    return any((folder / tag).glob("*_model_states.pt"))
