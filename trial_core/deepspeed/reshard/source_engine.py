"""An engine's state as DeepSpeed has saved it, put together by the names of its parameters.

Whichever ZeRO stage and number of data-parallel ranks saved it. Nothing is copied before it is
asked for: files are mapped into memory, and a parameter is a list of views of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from trial_core.deepspeed.reshard.parameter_state import (
    MASTER,
    Shapes,
    from_partitions,
    from_whole,
    other_groups,
)
from trial_core.deepspeed.reshard.partitions import part_of_each
from trial_core.errors import CheckpointDamaged, CheckpointError

Read = Callable[[Path], Any]

OPTIMIZER_STATES = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
MODEL_STATES = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


GLOBAL_STATE = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
"""What a ZeRO optimizer saves besides parameters and what its base optimizer has."""


class SavedEngine:
    """One engine's part of a checkpoint: that of one model-parallel rank, of all its shards.

    Args:
        folder: the files of the engine's tag.
        model_rank: which model-parallel rank's.
        present: the parameters that are trained now, by the optimizer's groups, in their order.
        read: what a file holds.

    Attributes:
        model: what a file of model states holds: the module, schedules, counters, the client's.
        parameters: by name; none frozen.
        groups: the optimizer's groups: learning rates and the like.
        global_state: those of `GLOBAL_STATE` that there are.

    Raises:
        CheckpointDamaged: a shard is missing.
        CheckpointError: it is of another model, or its layout is unknown here; says what differs.
    """

    def __init__(
        self, folder: Path, model_rank: int, present: Sequence[Shapes], read: Read
    ) -> None:
        self._folder = folder
        models = _files(folder, MODEL_STATES, model_rank)
        if not models:
            raise CheckpointDamaged(f"{folder} has no *_model_states.pt of rank {model_rank}")
        self._models = [read(file) for _, file in models]
        self.model: dict[str, Any] = self._models[0]
        self._cuts_weights = models[0][0] is not None
        self.global_state: dict[str, Any] = {}
        shards = [read(file) for _, file in _files(folder, OPTIMIZER_STATES, model_rank)]
        if shards:
            self._require_all(len(shards))
            optimizers = [shard["optimizer_state_dict"] for shard in shards]
            first = optimizers[0]
            self.global_state = {key: first[key] for key in GLOBAL_STATE if key in first}
            self.parameters, self.groups = from_partitions(self.model["param_shapes"], optimizers)
        else:
            self.parameters, self.groups = from_whole(
                self.model["module"], self.model["optimizer"], present
            )
        self._check(present)

    def whole(self, name: str) -> Any:
        """An entry of the module's state, whole. ZeRO-3 has left but an outline of the weights.

        Raises:
            CheckpointError: it cannot be put together.
        """
        held = self.model["module"][name]
        is_outline = isinstance(held, torch.Tensor) and held.numel() == 0
        if not self._cuts_weights or not is_outline:
            return held
        name = (self.model.get("shared_params") or {}).get(name, name)
        if name in self.parameters:
            return self.parameters[name].whole(MASTER, held.dtype)
        shapes = self.model.get("frozen_param_shapes") or {}
        if name in shapes:
            return self._frozen(name, shapes[name], held.dtype)
        if name in (self.model.get("buffer_names") or ()):
            return held
        raise CheckpointError(
            f"DeepSpeed's ZeRO-3 checkpoint does not hold {name}: probably a module that its "
            "parent holds under two names; resume with ZeRO-3 on as many ranks as saved it"
        )

    # ---------------------------------------------------------------------------- internals

    def _check(self, present: Sequence[Shapes]) -> None:
        """Check that the parameters are those of the model that is trained now."""
        if len(self.groups) != len(present):
            raise other_groups(len(self.groups), len(present))
        now = {name: group for group, shapes in enumerate(present) for name in shapes}
        shapes = {name: shape for group in present for name, shape in group.items()}
        for name in sorted(self.parameters.keys() | now.keys()):
            saved = self.parameters.get(name)
            before = saved.group if saved else None
            if saved is None or before != now.get(name):
                raise CheckpointError(
                    f"the parameter {name} was {_in_group(before)} when the checkpoint was saved, "
                    f"and is {_in_group(now.get(name))} now; resume the same model, with the same "
                    "parameters frozen"
                )
            if saved.shape != shapes[name]:
                raise CheckpointError(
                    f"the parameter {name} has the shape {tuple(saved.shape)} in the checkpoint, "
                    f"and {tuple(shapes[name])} now; resume the same model"
                )

    def _frozen(self, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A frozen weight, of all ranks' parts of it."""
        fragments = [model["frozen_param_fragments"][name].flatten() for model in self._models]
        part = part_of_each(shape.numel(), len(fragments))
        if any(each.dtype != dtype or each.numel() != part for each in fragments):
            raise CheckpointError(
                f"the frozen parameter {name} was saved as {fragments[0].numel()} elements of "
                f"{fragments[0].dtype} on each of {len(fragments)} ranks, where {part} of {dtype} "
                "were expected; resume with ZeRO-3 on as many ranks as saved it"
            )
        return torch.cat(fragments)[: shape.numel()].view(shape)

    def _require_all(self, shards: int) -> None:
        expected = int(self.model["dp_world_size"])
        if shards != expected or (self._cuts_weights and len(self._models) != expected):
            raise CheckpointDamaged(
                f"{self._folder} has the shards of {shards} data-parallel ranks, and {expected} "
                "saved it: fetch all of them"
            )


def _in_group(group: int | None) -> str:
    return "not trained" if group is None else f"in group {group} of the optimizer"


def _files(
    folder: Path, pattern: re.Pattern[str], model_rank: int
) -> list[tuple[int | None, Path]]:
    """A model-parallel rank's files of a kind, with the data-parallel ranks that they name."""
    matches = [(pattern.fullmatch(file.name), file) for file in sorted(folder.iterdir())]
    found = [
        (None if match[1] is None else int(match[1]), file)
        for match, file in matches
        if match and int(match[2]) == model_rank
    ]
    return sorted(found, key=lambda each: each[0] or 0)
