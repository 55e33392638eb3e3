"""The state of a `PyTorchTrial` in checkpoints.

Ranks have equal models and optimizers, so rank 0 writes them to one file, ``state_dict.pth``. It
uses Determined's names, and ``torch.load`` reads it. Frozen weights are in a file next to it: see
`frozen_files`. Gradients that are added up between two optimizer steps differ from rank to rank, so
each rank writes its own. Sharded tensors are in files of all ranks: see `sharded_state`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trial_core.checkpoint.weights.weights import (
    Precision,
    SavedWeight,
    has_16bit_weights,
    saved_all,
    tensors_of,
)
from trial_core.common.text_format import first_few
from trial_core.errors import CheckpointError, TrialError
from trial_core.processes.machine.memory_files import MemoryFiles
from trial_core.pytorch.context import PyTorchTrialContext
from trial_core.pytorch.distributed_model import unwrapped
from trial_core.pytorch.gradient_averaging import parameters_of
from trial_core.pytorch.sharded_model import sharded_parameters
from trial_core.pytorch.sharded_state import (
    Part,
    SavedParts,
    Targets,
    copy_parts,
    divided,
    file_name,
    joined,
    part_of,
    require_joined,
    write_parts,
)
from trial_core.rank.rank_state import STATE_FOLDER
from trial_core.rank.state_files.built_settings import read_parameters
from trial_core.rank.state_files.compiled_names import COMPILED
from trial_core.rank.state_files.frozen_files import (
    KeyPath,
    frozen_names,
    frozen_path,
    without_frozen,
)
from trial_core.rank.state_files.optimizer_load import optimizers_loaded_in_place
from trial_core.rank.state_files.parameter_order import parameter_names, saved_places
from trial_core.rank.state_files.read_imported_weights import imported_weights
from trial_core.rank.state_files.safe_load import Reader
from trial_core.rank.state_files.safe_save import readable
from trial_core.rank.state_files.tensor_files import write_tensors
from trial_core.rank.trial.optimizer_modes import (
    optimizers_evaluating,
    to_training_mode,
    with_modes,
)

STATE_FILE = "state_dict.pth"
FROZEN_FILE = frozen_path(Path(STATE_FILE)).name
GRADIENTS_FOLDER = "gradients"

MODELS = "models_state_dict"
WEIGHTS = "training_weights"
"""The models that are trained, if `MODELS` are averages of theirs."""
OPTIMIZERS = "optimizers_state_dict"
SCHEDULERS = "lr_schedulers_state_dict"
SCALER = "scaler_state_dict"
GRADIENTS = "gradients"
_PREFIX = "module."


def state_of(context: PyTorchTrialContext) -> dict[str, Any]:
    """The state of all that the trial has wrapped, by Determined's names. Collective.

    Raises TrialError if an optimizer divides its state in another way than its parameters.
    """
    for index, optimizer in enumerate(context.optimizers):
        _require_divided_alike(index, optimizer)
    to_training_mode(context.optimizers)
    models = [unwrapped(model) for model in context.models]
    context.left_out = _left_out(context, models)
    state: dict[str, Any] = {
        MODELS: [_model_state(*each) for each in zip(models, context.left_out, strict=True)],
        OPTIMIZERS: [optimizer.state_dict() for optimizer in context.optimizers],
        SCHEDULERS: [scheduler.state_dict() for scheduler in context.lr_schedulers],
    }
    if (averages := _validated_weights(context)) is not None:
        state[WEIGHTS] = state[MODELS]
        state[MODELS] = [
            _averaged(*each) for each in zip(models, state[WEIGHTS], averages, strict=True)
        ]
    if context.scaler is not None:
        state[SCALER] = context.scaler.state_dict()
    return state


def write_state(
    context: PyTorchTrialContext,
    folder: Path,
    memory_files: MemoryFiles,
    reader: Reader,
    state: Mapping[str, Any],
) -> None:
    """Write `state_of`'s result, as far as it is this rank's to write. Every rank calls this.

    Raises TrialError if the state holds objects that `reader` would not read.
    """
    rank = context.distributed.get_rank()
    frozen = {
        (kind, index, name)
        for kind in (MODELS, WEIGHTS)
        for index, model in enumerate(context.models)
        for name in frozen_names(unwrapped(model))
    }
    common, parts = divided(state)
    if rank == 0:
        common, taken = without_frozen(readable(common, reader), frozen)
        memory_files.write(folder, STATE_FILE, lambda file: write_tensors(common, file))
        if taken:
            memory_files.write(folder, FROZEN_FILE, lambda file: write_tensors(taken, file))
    write_parts(parts, rank, folder, memory_files, frozen)


def read_state(
    folder: Path,
    reader: Reader,
    kinds: Sequence[str] = (MODELS,),
    context: PyTorchTrialContext | None = None,
) -> dict[str, Any]:
    """Read what `write_state` wrote; tensors stay in the file until they are used.

    Args:
        kinds: the kinds of state to join from shards: `MODELS`, `OPTIMIZERS`. The rest stays a
            placeholder.
        context: join to tensors like the trial's own, sharded or not; None joins to whole tensors.

    Raises CheckpointError if the file does not exist, or it holds objects that run code when read,
    or a shard is missing.
    """
    if context is not None and len(context.models) == 1:
        names = unwrapped(context.models[0]).state_dict().keys()
        if (weights := imported_weights(folder, names, reader)) is not None:
            targets = _own_tensors(kinds, context, ())
            return joined({MODELS: [weights]}, SavedParts(folder, kinds, reader), targets)
    path = folder / STATE_FILE
    if not path.is_file():
        raise CheckpointError(
            f"the checkpoint has no {STATE_FILE}: a PyTorchTrial did not save it; resume with the "
            "kind of trial that saved it"
        )
    parts = SavedParts(folder, kinds, reader)
    if context is None:
        targets = _whole_tensors(kinds, parts)
    else:
        targets = _own_tensors(kinds, context, read_parameters(folder / STATE_FOLDER))
    return joined(reader.load_mapped(path), parts, targets)


def load_state(context: PyTorchTrialContext, state: Mapping[str, Any]) -> None:
    """Restore all that the trial has wrapped.

    Parts that `state` lacks are left unchanged: a callback may have removed them. Raises
    CheckpointError if the checkpoint is of other models, optimizers or schedulers.
    """
    load_models(context, {MODELS: state.get(WEIGHTS, state.get(MODELS))})
    if context.averages is not None and WEIGHTS in state:
        context.averages.load_averages(state[MODELS])
    for key, targets in ((OPTIMIZERS, context.optimizers), (SCHEDULERS, context.lr_schedulers)):
        for target, saved in _pairs(key, targets, state):
            require_joined(saved)
            try:
                with optimizers_loaded_in_place(context.optimizers):
                    target.load_state_dict(saved)
            except (ValueError, KeyError) as error:
                raise CheckpointError(
                    f"the checkpoint does not fit the trial: its {key} is refused by "
                    f"{type(target).__name__}: {error}"
                ) from error
    if context.scaler is not None and state.get(SCALER):  # empty: of a disabled scaler
        context.scaler.load_state_dict(state[SCALER])


def load_models(context: PyTorchTrialContext, state: Mapping[str, Any]) -> None:
    """Restore the models alone. Raises CheckpointError if the checkpoint is of others."""
    for index, (model, saved) in enumerate(_pairs(MODELS, context.models, state)):
        _load_model(index, unwrapped(model), saved)


def model_weights(
    folder: Path, model: int, dtype: Precision, reader: Reader
) -> dict[str, SavedWeight]:
    """The weights and persistent buffers of one model, by the names of its ``state_dict``.

    Tied names map to one weight, which takes memory only when it is read. Called by one
    process; needs no other ranks.

    Args:
        folder: a checkpoint's verified files, at least ``state_dict.pth``.
        dtype: ``fp32``: 16-bit weights are converted. ``16bit``: the weights as they are.

    Raises CheckpointError if the model does not exist, or has no 16-bit weights; or the file holds
    objects that the reader does not trust.
    """
    saved = read_state(folder, reader).get(MODELS) or []
    if not saved:
        raise CheckpointError(f"{STATE_FILE} holds no {MODELS}: a callback may have removed them")
    if not 0 <= model < len(saved):
        indexes = ", ".join(map(str, range(len(saved))))
        raise CheckpointError(f"the checkpoint has no model {model}: its models are {indexes}")
    weights = tensors_of(saved[model])
    has_16bit_weights(weights, f"model {model}", dtype)
    return saved_all(weights, dtype)


def write_gradients(context: PyTorchTrialContext, folder: Path, memory_files: MemoryFiles) -> None:
    """Write this rank's gradients, if it has added some up since the last optimizer step."""
    gradients: list[dict[str, torch.Tensor]] = []
    parts: dict[KeyPath, Part] = {}
    for index, model in enumerate(context.models):
        gradients.append({})
        for name, parameter in sharded_parameters(unwrapped(model)).items():
            if isinstance(parameter.grad, DTensor):
                parts[(GRADIENTS, index, name)] = part_of(parameter.grad)
            elif parameter.grad is not None:
                gradients[index][name] = parameter.grad
    rank = context.distributed.get_rank()
    write_parts(parts, rank, folder, memory_files)
    if any(gradients):
        content = {"ranks": context.distributed.get_size(), "models": gradients}
        name = f"{GRADIENTS_FOLDER}/{file_name(rank)}"
        memory_files.write(folder, name, lambda file: write_tensors(content, file))


def load_gradients(context: PyTorchTrialContext, folder: Path, reader: Reader) -> None:
    """Restore the gradients of `write_gradients`.

    With another number of ranks than saved them, or another sharding, every rank gets their mean.
    """
    by_rank = {
        path.name: reader.load_mapped(path) for path in (folder / GRADIENTS_FOLDER).glob("*.pt")
    }
    parts = SavedParts(folder, [GRADIENTS], reader)
    own = file_name(context.distributed.get_rank())
    for index, model in enumerate(context.models):
        for name, parameter in sharded_parameters(unwrapped(model)).items():
            gradient = torch.empty_like(parameter, requires_grad=False)
            if (keys := (GRADIENTS, index, name)) in parts:
                parts.fill(keys, gradient)
                parameter.grad = gradient
                continue
            only = None if isinstance(parameter, DTensor) else own
            mean = _mean_gradient(by_rank, index, name, only, context.distributed.get_size())
            if mean is not None:
                copy_parts([part_of(mean)], gradient)
                parameter.grad = gradient


def _mean_gradient(
    by_rank: Mapping[str, Any], index: int, name: str, own: str | None, ranks: int
) -> torch.Tensor | None:
    """The mean of the gradients that ranks have saved, if any; if as many `ranks` have, this rank's
    `own` file, if given, counts alone."""
    if not by_rank:
        return None
    saved_by = next(iter(by_rank.values()))["ranks"]  # some of them may have had no gradients
    if own is not None and saved_by == ranks:
        by_rank, saved_by = {file: by_rank[file] for file in by_rank if file == own}, 1
    models = [each["models"][index] for _, each in sorted(by_rank.items())]
    gradients = [model[name] for model in models if name in model]
    return torch.stack(gradients).sum(0).div_(saved_by) if gradients else None


def _whole_tensors(kinds: Sequence[str], parts: SavedParts) -> Targets:
    """For `joined`: an empty tensor for each that is sharded in the checkpoint, and one for tied
    weights, as in a checkpoint that is not sharded: an export needs it."""
    whole: dict[Hashable, torch.Tensor] = {}

    def target(keys: KeyPath, saved: torch.Tensor) -> torch.Tensor | None:
        if not saved.is_meta or keys[0] not in kinds:
            return None
        return whole.setdefault(parts.memory(keys), torch.empty(saved.shape, dtype=saved.dtype))

    return target


def _own_tensors(
    kinds: Sequence[str], context: PyTorchTrialContext, saved: Sequence[Sequence[str]]
) -> Targets:
    """For `joined`: an empty tensor for each that is sharded in the checkpoint, or in the trial.

    `saved` has the names of each optimizer's parameters in the checkpoint, if they are known.
    """
    models = [unwrapped(model) for model in context.models]
    tensors: dict[KeyPath, Any] = {}
    for index, model in enumerate(models):
        for name, tensor in model.state_dict().items():
            tensors[(MODELS, index, name)] = tensor
            tensors[(WEIGHTS, index, name)] = tensor
            tensors.setdefault((MODELS, index, f"{_PREFIX}{name}"), tensor)
    for index, optimizer in enumerate(context.optimizers):
        then = saved[index] if index < len(saved) else ()
        places = saved_places(parameter_names(optimizer, models), then)
        for place, parameter in enumerate(parameters_of(optimizer)):
            number = places[place] if places else place
            tensors[(OPTIMIZERS, index, "state", number)] = parameter

    def target(keys: KeyPath, saved: torch.Tensor) -> torch.Tensor | None:
        own = tensors.get(keys[:4]) if keys[0] in kinds else None
        if not isinstance(own, torch.Tensor) or own.shape != saved.shape:
            return None
        if not (saved.is_meta or isinstance(own, DTensor)):
            return None
        with torch.no_grad():
            return torch.empty_like(own, dtype=saved.dtype)

    return target


def _require_divided_alike(index: int, optimizer: Optimizer) -> None:
    for parameter, values in optimizer.state.items():
        for name, value in values.items() if isinstance(parameter, DTensor) else ():
            if not isinstance(value, torch.Tensor) or _is_divided_alike(value, parameter):
                continue
            raise TrialError(
                f"optimizer {index} ({type(optimizer).__name__}) does not divide its {name!r} "
                "among the ranks as FSDP2 divides the parameter, of shape "
                f"{tuple(parameter.shape)}; checkpoints cannot hold it. Train with "
                "optimizations.sharding: none, or with another optimizer"
            )


def _is_divided_alike(value: torch.Tensor, parameter: Any) -> bool:
    if not isinstance(value, DTensor):
        return value.numel() == 1  # a number that all ranks share, such as Adam's `step`
    return value.shape == parameter.shape and bool(value.placements == parameter.placements)


def _left_out(context: PyTorchTrialContext, models: Sequence[nn.Module]) -> list[set[str]]:
    """Of each model, the names of the parameters that a checkpoint leaves out. Collective."""
    if not context.run_info.checkpointing.exclude_frozen_parameters:
        return [set() for _ in models]
    frozen, built = [frozen_names(model) for model in models], context.frozen_as_built
    changed = built.changed() if built is not None else [set[str]() for _ in models]
    return [names - of_model for names, of_model in zip(frozen, changed, strict=True)]


def _model_state(model: nn.Module, left_out: set[str]) -> dict[str, Any]:
    state = model.state_dict()
    for name in left_out:
        state.pop(name, None)
    return state


def _validated_weights(context: PyTorchTrialContext) -> list[dict[str, torch.Tensor]] | None:
    """For each model, the parameters that validations see in place of the trained ones, if any."""
    if context.averages is not None:
        averages: list[dict[str, torch.Tensor]] = context.averages.averages
        return averages
    if not with_modes(context.optimizers):
        return None
    with optimizers_evaluating(context.optimizers) as parameters:
        switched = {id(each) for each in parameters}
        return [
            {
                name: each.detach().clone()
                for name, each in unwrapped(model).named_parameters()
                if id(each) in switched
            }
            for model in context.models
        ]


def _averaged(
    model: nn.Module, state: Mapping[str, Any], averages: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """`state` with averages of parameters, also under their other names if they are tied."""
    names = {id(each): name for name, each in model.named_parameters()}
    own = model.state_dict(keep_vars=True)
    return {
        name: averages.get(names.get(id(own[name]), name), value) for name, value in state.items()
    }


def _load_model(index: int, model: nn.Module, saved: Mapping[str, Any]) -> None:
    if any(COMPILED in name for name in saved):  # Determined's
        saved = {name.replace(COMPILED, ""): value for name, value in saved.items()}
    if saved and all(name.startswith(_PREFIX) for name in saved):
        own = model.state_dict()
        if not any(name.startswith(_PREFIX) for name in own):
            saved = {name.removeprefix(_PREFIX): value for name, value in saved.items()}
    try:
        missing, unexpected = model.load_state_dict(saved, strict=False)
    except RuntimeError as error:  # other shapes
        raise CheckpointError(f"model {index} does not fit the checkpoint: {error}") from error
    own = model.state_dict(keep_vars=True)
    loaded = {id(each) for name, each in own.items() if name not in missing}
    frozen = frozen_names(model)
    lacks = [name for name in missing if name not in frozen and id(own[name]) not in loaded]
    kinds = (("lacks", lacks), ("has also", unexpected))
    if differing := [f"{verb} {first_few(names)}" for verb, names in kinds if names]:
        raise CheckpointError(
            f"model {index} ({type(model).__name__}) does not fit the checkpoint, which "
            f"{' and '.join(differing)}; resume with the model that was saved"
        )


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
