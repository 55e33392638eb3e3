"""A saved engine's state, assembled by parameter name from the shards of all ranks.

Files are mapped into memory, and a parameter is a list of views of them: nothing is copied before
it is used.
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
    parameters_from_full_state,
    parameters_from_partitions,
    require_group_count,
    zero3_part_elements,
)
from trial_core.errors import CheckpointDamaged, CheckpointError

ReadFile = Callable[[Path], Any]
"""Returns the content of a file that `torch.save` wrote; should map tensors, to need no memory."""

OPTIMIZER_STATES = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
MODEL_STATES = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")

GLOBAL_STATE = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
"""Keys of a ZeRO optimizer's state that belong neither to parameters nor to its base optimizer."""


class SourceEngine:
    """One engine of a checkpoint: the shards of all data-parallel ranks of a model-parallel rank.

    `folder` has the files under the engine's tag; `target_groups` are the parameters that the live
    engine trains, by optimizer group; `names` those of the saved optimizer, if they are known.
    Raises CheckpointDamaged if a shard is missing, and CheckpointError if the checkpoint is of
    another model, or its layout is unknown.

    Attributes:
        model: content of the model-states file: module, schedules, counters, client state.
        parameters: state of the trained parameters, by name.
        groups: the optimizer's groups, with learning rates and the like.
        global_state: the `GLOBAL_STATE` keys that were saved.
    """

    def __init__(
        self,
        folder: Path,
        model_rank: int,
        target_groups: Sequence[Shapes],
        read: ReadFile,
        names: Sequence[str] = (),
    ) -> None:
        model_files = rank_files(folder, MODEL_STATES, model_rank)
        if not model_files:
            raise CheckpointDamaged(f"{folder} has no *_model_states.pt of rank {model_rank}")
        self._models = [read(file) for _, file in model_files]
        self.model: dict[str, Any] = self._models[0]
        self._is_zero3 = model_files[0][0] is not None
        self.global_state: dict[str, Any] = {}
        shards = [read(file) for _, file in rank_files(folder, OPTIMIZER_STATES, model_rank)]
        if shards:
            expected = int(self.model["dp_world_size"])
            if len(shards) != expected or (self._is_zero3 and len(self._models) != expected):
                raise CheckpointDamaged(
                    f"{folder} has the shards of {len(shards)} data-parallel ranks, but "
                    f"{expected} ranks saved the checkpoint; fetch all shards"
                )
            optimizers = [shard["optimizer_state_dict"] for shard in shards]
            first = optimizers[0]
            self.global_state = {key: first[key] for key in GLOBAL_STATE if key in first}
            buffers = [  # of a mixture of experts, DeepSpeed saves plain tuples
                {name: torch.Size(shape) for name, shape in shapes.items()}
                for shapes in self.model["param_shapes"]
            ]
            self.parameters, self.groups = parameters_from_partitions(buffers, optimizers)
        else:
            self.parameters, self.groups = parameters_from_full_state(
                self.model["module"], self.model["optimizer"], target_groups, names
            )
        self._check_parameters(target_groups)

    def full_entry(self, name: str) -> Any:
        """An entry of the module's state dict, assembled if ZeRO-3 has partitioned it.

        Raises CheckpointError if the checkpoint does not hold it.
        """
        saved = self.model["module"][name]
        is_placeholder = isinstance(saved, torch.Tensor) and saved.numel() == 0
        if not self._is_zero3 or not is_placeholder:
            return saved
        name = (self.model.get("shared_params") or {}).get(name, name)
        if name in self.parameters:
            return self.parameters[name].full_tensor(MASTER, saved.dtype)
        frozen_shapes = self.model.get("frozen_param_shapes") or {}
        if name in frozen_shapes:
            return self._frozen_parameter(name, frozen_shapes[name], saved.dtype)
        if name in (self.model.get("buffer_names") or ()):
            return saved
        raise CheckpointError(
            f"DeepSpeed's ZeRO-3 checkpoint does not hold {name}; the probable cause is a module "
            "that its parent holds under two names; resume with ZeRO-3 on as many ranks as saved it"
        )

    def _check_parameters(self, target_groups: Sequence[Shapes]) -> None:
        """Check that the saved parameters are the ones that the live engine trains."""
        require_group_count(len(self.groups), len(target_groups))
        group_now = {name: group for group, shapes in enumerate(target_groups) for name in shapes}
        shape_now = {name: shape for group in target_groups for name, shape in group.items()}
        for name in sorted(self.parameters.keys() | group_now.keys()):
            saved = self.parameters.get(name)
            group_saved = saved.group if saved else None
            if saved is None or group_saved != group_now.get(name):
                raise CheckpointError(
                    f"the parameter {name} was {_membership(group_saved)} when the checkpoint was "
                    f"saved, and is {_membership(group_now.get(name))} now; resume the same model, "
                    "with the same parameters frozen"
                )
            if saved.shape != shape_now[name]:
                raise CheckpointError(
                    f"the parameter {name} has the shape {tuple(saved.shape)} in the checkpoint, "
                    f"and {tuple(shape_now[name])} now; resume the same model"
                )

    def _frozen_parameter(self, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A frozen weight, from the parts of all ranks."""
        parts = [model["frozen_param_fragments"][name].flatten() for model in self._models]
        expected = zero3_part_elements(shape.numel(), len(parts))
        if any(part.dtype != dtype or part.numel() != expected for part in parts):
            raise CheckpointError(
                f"the frozen parameter {name} was saved as {parts[0].numel()} elements of "
                f"{parts[0].dtype} on each of {len(parts)} ranks; expected {expected} of {dtype}; "
                "resume with ZeRO-3 on as many ranks as saved it"
            )
        return torch.cat(parts)[: shape.numel()].view(shape)


def _membership(group: int | None) -> str:
    return "not trained" if group is None else f"in group {group} of the optimizer"


def rank_files(
    folder: Path, pattern: re.Pattern[str], model_rank: int
) -> list[tuple[int | None, Path]]:
    """A model-parallel rank's files of one kind, by data-parallel rank (None: not in the name)."""
    matches = [(pattern.fullmatch(file.name), file) for file in sorted(folder.iterdir())]
    found = [
        (None if match[1] is None else int(match[1]), file)
        for match, file in matches
        if match and int(match[2]) == model_rank
    ]
    return sorted(found, key=lambda item: item[0] or 0)
