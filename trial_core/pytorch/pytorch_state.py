"""The state of a `PyTorchTrial` in checkpoints.

Ranks have equal models and optimizers, so rank 0 writes them, as ``state_dict.pth``: one file with
the names of Determined's, which ``torch.load`` reads. Gradients that a checkpoint finds added up
between two optimizer steps differ from rank to rank, and each rank writes its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trial_core.controller.safe_load import Reader
from trial_core.controller.tensor_files import write_tensors
from trial_core.errors import CheckpointError
from trial_core.pytorch.context import PyTorchTrialContext
from trial_core.pytorch.distributed_model import unwrapped
from trial_core.transfer.memory_files import MemoryFiles

STATE_FILE = "state_dict.pth"
GRADIENTS_FOLDER = "gradients"

MODELS = "models_state_dict"
OPTIMIZERS = "optimizers_state_dict"
SCHEDULERS = "lr_schedulers_state_dict"
SCALER = "scaler_state_dict"
_PREFIX = "module."


def state_of(context: PyTorchTrialContext) -> dict[str, Any]:
    """The state of all that the trial has wrapped, by the reference's names."""
    settings = context.get_experiment_config().get("checkpointing") or {}
    excludes_frozen = bool(settings.get("exclude_frozen_parameters"))
    models = [unwrapped(model) for model in context.models]
    state: dict[str, Any] = {
        MODELS: [_model_state(model, excludes_frozen) for model in models],
        OPTIMIZERS: [optimizer.state_dict() for optimizer in context.optimizers],
        SCHEDULERS: [scheduler.state_dict() for scheduler in context.lr_schedulers],
    }
    if context.scaler is not None:
        state[SCALER] = context.scaler.state_dict()
    return state


def write_state(folder: Path, memory_files: MemoryFiles, state: Mapping[str, Any]) -> None:
    """Write `state_of`'s result. Rank 0 calls this."""
    memory_files.write(folder, STATE_FILE, lambda file: write_tensors(dict(state), file))


def read_state(folder: Path, reader: Reader) -> dict[str, Any]:
    """Read what `write_state` wrote; tensors stay in the file until they are used.

    Raises:
        CheckpointError: there is no such file, or it holds objects that run code when read.
    """
    path = folder / STATE_FILE
    if not path.is_file():
        raise CheckpointError(
            f"the checkpoint has no {STATE_FILE}: a PyTorchTrial did not save it; resume with the "
            "kind of trial that saved it"
        )
    state: dict[str, Any] = reader.load_mapped(path)
    return state


def load_state(context: PyTorchTrialContext, state: Mapping[str, Any]) -> None:
    """Restore all that the trial has wrapped.

    What `state` lacks is left unchanged: a callback may have removed it.

    Raises:
        CheckpointError: the checkpoint is of other models, optimizers or schedulers.
    """
    load_models(context, state)
    for key, targets in ((OPTIMIZERS, context.optimizers), (SCHEDULERS, context.lr_schedulers)):
        for target, saved in _pairs(key, targets, state):
            try:
                target.load_state_dict(saved)
            except (ValueError, KeyError) as error:
                raise CheckpointError(
                    f"the checkpoint does not fit the trial: its {key} is refused by "
                    f"{type(target).__name__}: {error}"
                ) from error
    if SCALER in state and context.scaler is not None:
        context.scaler.load_state_dict(state[SCALER])


def load_models(context: PyTorchTrialContext, state: Mapping[str, Any]) -> None:
    """Restore the models alone.

    Raises:
        CheckpointError: the checkpoint is of other models.
    """
    for index, (model, saved) in enumerate(_pairs(MODELS, context.models, state)):
        _load_model(index, unwrapped(model), saved)


def write_gradients(context: PyTorchTrialContext, folder: Path, memory_files: MemoryFiles) -> None:
    """Write this rank's gradients, if it has added some up since the last optimizer step."""
    gradients = [
        {name: each.grad for name, each in unwrapped(model).named_parameters()
         if each.grad is not None}
        for model in context.models
    ]  # fmt: skip
    if any(gradients):
        content = {"ranks": context.distributed.get_size(), "models": gradients}
        name = _gradients_name(context.distributed.get_rank())
        memory_files.write(folder, name, lambda file: write_tensors(content, file))


def load_gradients(context: PyTorchTrialContext, folder: Path, reader: Reader) -> None:
    """Restore the gradients of `write_gradients`.

    With another number of ranks than saved them, every rank gets their mean.
    """
    by_rank = {path.name: reader.load_mapped(path)
               for path in (folder / GRADIENTS_FOLDER).glob("*.pt")}  # fmt: skip
    if not by_rank:
        return
    ranks = next(iter(by_rank.values()))["ranks"]  # some of them may have had no gradients
    if ranks == context.distributed.get_size():
        own = Path(_gradients_name(context.distributed.get_rank())).name
        by_rank, ranks = {name: by_rank[name] for name in by_rank if name == own}, 1
    for index, model in enumerate(context.models):
        for name, parameter in unwrapped(model).named_parameters():
            saved = [each["models"][index] for _, each in sorted(by_rank.items())]
            parts = [each[name].to(parameter.device) for each in saved if name in each]
            if parts:
                parameter.grad = torch.stack(parts).sum(0).div_(ranks).to(parameter.dtype)


def _gradients_name(rank: int) -> str:
    return f"{GRADIENTS_FOLDER}/rank-{rank:05d}.pt"


def _model_state(model: nn.Module, excludes_frozen: bool) -> dict[str, Any]:
    state = model.state_dict()
    if excludes_frozen:
        for name in _frozen(model):
            state.pop(name, None)
    return state


def _frozen(model: nn.Module) -> set[str]:
    return {name for name, each in model.named_parameters() if not each.requires_grad}


def _load_model(index: int, model: nn.Module, saved: Mapping[str, Any]) -> None:
    if saved and all(name.startswith(_PREFIX) for name in saved):
        own = model.state_dict()
        if not any(name.startswith(_PREFIX) for name in own):
            saved = {name.removeprefix(_PREFIX): value for name, value in saved.items()}
    try:
        missing, unexpected = model.load_state_dict(saved, strict=False)
    except RuntimeError as error:  # other shapes
        raise CheckpointError(f"model {index} does not fit the checkpoint: {error}") from error
    lacks = [name for name in missing if name not in _frozen(model)]
    if lacks or unexpected:
        raise CheckpointError(
            f"model {index} ({type(model).__name__}) does not fit the checkpoint, which "
            f"{'lacks ' + _some(lacks) if lacks else ''}{' and ' if lacks and unexpected else ''}"
            f"{'has also ' + _some(unexpected) if unexpected else ''}; resume with the model that "
            "was saved"
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _pairs(key: str, targets: Sequence[Any], state: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    saved = state.get(key)
    if saved is None:
        return []
    if len(saved) != len(targets):
        raise CheckpointError(
            f"the checkpoint does not fit the trial: its {key} has {len(saved)} entries, and the "
            f"trial has wrapped {len(targets)}; wrap as many, in the same order"
        )
    return list(zip(targets, saved, strict=True))
