"""What an optimizer has of each parameter, found by name in what DeepSpeed saves of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trial_core.deepspeed.reshard.partitions import Fragment, Partitions
from trial_core.errors import CheckpointError

Shapes = Mapping[str, torch.Size]
Groups = list[dict[str, Any]]

MASTER = "master"
"""What a `Parameter` calls its fp32 weights, beside the optimizer's states."""


@dataclass(frozen=True)
class Keys:
    """What ZeRO calls the fp32 weights, and the state of the optimizer that it drives."""

    masters: str
    base: str

    @classmethod
    def of(cls, cuts_each: bool) -> Keys:
        """Under ZeRO-3, or under ZeRO 1 and 2."""
        if cuts_each:
            return cls("fp32_flat_groups", "optimizer_state_dict")
        return cls("single_partition_of_fp32_groups", "base_optimizer_state")


@dataclass
class Parameter:
    """What the optimizer has of one parameter.

    Attributes:
        group: the optimizer's group that it is in.
        pieces: the first element of each piece, of the parameter flattened, and what there is of
            it by name: the fp32 weights (`MASTER`) and the optimizer's own, ``exp_avg`` say.
        values: what the optimizer has of it besides, not by element: ``step``.
    """

    shape: torch.Size
    group: int
    pieces: list[tuple[int, dict[str, torch.Tensor]]] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def states(self) -> Mapping[str, torch.dtype]:
        """What there is of each element, and as what."""
        return {name: tensor.dtype for name, tensor in self.pieces[0][1].items()}

    def copy(self, state: str, first: int, into: torch.Tensor) -> None:
        """Copy elements from `first` on into a flat tensor, as many as it takes."""
        last, copied = first + into.numel(), 0
        for begin, tensors in self.pieces:
            piece = tensors[state]
            left, right = max(first, begin), min(last, begin + piece.numel())
            if left < right:
                into[left - first : right - first].copy_(piece[left - begin : right - begin])
                copied += right - left
        if copied != into.numel():
            raise CheckpointError(
                f"a parameter of shape {tuple(self.shape)} has {copied} of the elements from "
                f"{first} to {last} in the checkpoint: this version of trialflow does not know how "
                "the DeepSpeed that saved it lays them out"
            )

    def whole(self, state: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor of its own, of the parameter's shape and by default of the type it has."""
        tensor = torch.empty(self.shape.numel(), dtype=dtype or self.states[state])
        self.copy(state, 0, tensor)
        return tensor.view(self.shape)


def from_partitions(
    buffers: Sequence[Shapes], optimizers: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Parameter], Groups]:
    """The parameters in the partitions of all data-parallel ranks, and the optimizer's groups.

    Args:
        buffers: the shapes of the parameters in each flat buffer, in their order there.
        optimizers: what each rank's ZeRO optimizer has saved.

    Raises:
        CheckpointError: they cannot be found; says why.
    """
    first = optimizers[0]
    cuts_each = "fp32_flat_groups" in first
    keys = Keys.of(cuts_each)
    if not isinstance(first[keys.base], Mapping):
        raise CheckpointError(
            "the checkpoint was saved with DeepSpeed's zero_optimization.elastic_checkpoint, "
            "which does not keep the optimizer's groups; resume on as many ranks as saved it"
        )
    groups: Groups = first[keys.base]["param_groups"]
    group_of = {buffer: i for i, group in enumerate(groups) for buffer in group["params"]}
    paddings = first.get("param_alignment_paddings")
    cut = Partitions(buffers, paddings, len(optimizers), cuts_each)
    found: dict[str, Parameter] = {}
    for buffer, shapes in enumerate(buffers):
        for name, shape in shapes.items():
            found[name] = Parameter(shape, group_of[buffer])
        # The first rank's is as large as any: unless it has everything, it has no padding.
        size = first[keys.masters][buffer].numel()
        for rank, optimizer in enumerate(optimizers):
            master = optimizer[keys.masters][buffer].detach()
            padding = 0 if cuts_each else optimizer["group_paddings"][buffer]
            state = optimizer[keys.base]["state"].get(buffer, {})
            _add_pieces(found, cut.pieces(buffer, rank, size), master, padding, state)
    return found, groups


def from_whole(
    module: Mapping[str, Any] | None,
    optimizer: Mapping[str, Any] | None,
    present: Sequence[Shapes],
) -> tuple[dict[str, Parameter], Groups]:
    """The parameters in the state that every rank has whole, and the optimizer's groups.

    Args:
        module: what there is of the module, weights among it.
        optimizer: what the optimizer has saved; without names.
        present: the parameters that are trained now, by the optimizer's groups, in their order.

    Raises:
        CheckpointError: they cannot be found; says why.
    """
    odd = None
    if optimizer is None or "param_groups" not in optimizer:
        odd = "without ZeRO and in 16 bits, where DeepSpeed keeps fp32 weights in a way of its own"
    elif module is None:
        odd = "without ZeRO by a pipeline, whose weights have other names than the optimizer's"
    if optimizer is None or module is None or odd is not None:
        raise CheckpointError(
            f"the checkpoint was saved {odd}; resume with ZeRO stage 0, or take the weights alone: "
            "searcher.source_weights_only=true"
        )
    groups: Groups = optimizer["param_groups"]
    if len(groups) != len(present):
        raise other_groups(len(groups), len(present))
    found: dict[str, Parameter] = {}
    for group, (saved, wanted) in enumerate(zip(groups, present, strict=True)):
        indices = list(saved["params"])
        if len(indices) != len(wanted):  # frozen ones are counted, and have no state
            indices = [index for index in indices if index in optimizer["state"]]
        if len(indices) != len(wanted):
            raise CheckpointError(
                f"group {group} of the optimizer had {len(saved['params'])} parameters when "
                f"the checkpoint was saved, and has {len(wanted)} now; resume the same model "
                "with the same groups"
            )
        for index, name in zip(indices, wanted, strict=True):
            if name not in module:
                raise CheckpointError(f"the checkpoint has no {name}: was it of this model?")
            found[name] = _whole(name, module[name], group, optimizer["state"].get(index, {}))
    return found, groups


def other_groups(saved: int, now: int) -> CheckpointError:
    """The error for optimizers that divide parameters otherwise."""
    return CheckpointError(
        f"the optimizer had {saved} groups of parameters when the checkpoint was saved, and has "
        f"{now} now; resume with the same groups"
    )


def _add_pieces(
    found: Mapping[str, Parameter],
    pieces: list[Fragment],
    master: torch.Tensor,
    padding: int,
    state: Mapping[str, Any],
) -> None:
    """Find parameters in one partition.

    Args:
        padding: how many elements longer the optimizer's state is.
    """
    size = master.numel()
    tensors, values = _divided(state, (size, size + padding))
    for piece in pieces:
        end = piece.offset + piece.count
        if end > size:
            raise CheckpointError(
                f"{piece.name} should lie at {piece.offset} to {end} of a partition that has "
                f"{size} elements: this version of trialflow does not know the layout of the "
                "DeepSpeed that saved the checkpoint"
            )
        views = {key: flat[piece.offset : end] for key, flat in tensors.items()}
        views[MASTER] = master[piece.offset : end]
        found[piece.name].values = values
        found[piece.name].pieces.append((piece.first, views))


def _divided(
    state: Mapping[str, Any], sizes: tuple[int, int]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """An optimizer's state of a flat tensor: what there is of each element, and the rest.

    Args:
        sizes: how many elements there are, without padding and with it.
    """
    tensors, values = {}, {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            values[key] = value
        elif value.dim() == 1 and value.numel() in sizes:
            tensors[key] = value
        else:
            raise CheckpointError(
                f"the optimizer's {key} has the shape {tuple(value.shape)} for {sizes[0]} "
                "elements: it is neither one value nor one for each of them, so it cannot be "
                "shared out over other ranks; resume on as many ranks as saved it"
            )
    return tensors, values


def _whole(name: str, weight: torch.Tensor, group: int, state: Mapping[str, Any]) -> Parameter:
    """A parameter that nobody has cut."""
    tensors = {key: value for key, value in state.items() if key != "step"}
    for key, value in tensors.items():
        if getattr(value, "shape", None) != weight.shape:
            raise CheckpointError(
                f"the optimizer's {key} of {name} is not of the shape {tuple(weight.shape)}, so it "
                "cannot be shared out over ranks; resume with ZeRO stage 0"
            )
    flat = {key: value.reshape(-1) for key, value in {MASTER: weight, **tensors}.items()}
    values = {key: value for key, value in state.items() if key == "step"}
    return Parameter(weight.shape, group, [(0, flat)], values)
