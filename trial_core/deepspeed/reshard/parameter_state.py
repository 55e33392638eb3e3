"""The optimizer's state of each parameter, by the parameter's name, and where ZeRO keeps it.

`parameters_from_partitions` reads what ZeRO saves, `parameters_from_full_state` what an optimizer
without ZeRO saves.

ZeRO 1 and 2 lay the parameters of an optimizer group end to end in one flat buffer. The buffer is
cut into equal partitions, one for each data-parallel rank; a cut may go through a parameter. ZeRO-3
cuts every parameter into equal parts, and each rank lays its parts end to end. Both pad the end
before they cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from trial_core.errors import CheckpointError
from trial_core.rank.state_files.parameter_order import saved_places

Groups = list[dict[str, Any]]

Shapes = Mapping[str, torch.Size]
"""Parameters by name, in the order of their buffer or optimizer group."""

MASTER = "master"
"""Key of a parameter's fp32 weights, next to the optimizer's own keys such as ``exp_avg``."""

MUON_MOMENTUM = "momentum_buffer"
"""Key of Muon's momentum. With ZeRO 1 and 2, unless the optimizer is offloaded, a rank holds all of
it for each parameter of which its partition has elements, end to end."""


def zero_keys(is_zero3: bool) -> tuple[str, str]:
    """ZeRO's keys for the fp32 weights, and for the state of the optimizer that it wraps."""
    if is_zero3:
        return "fp32_flat_groups", "optimizer_state_dict"
    return "single_partition_of_fp32_groups", "base_optimizer_state"


@dataclass(frozen=True)
class Fragment:
    """Consecutive elements of one parameter, in the partition of one rank.

    Its first element has the index `first` in the flattened parameter, `offset` in the partition.
    """

    name: str
    first: int
    count: int
    offset: int


@dataclass(frozen=True)
class Partitions:
    """How an engine's parameters are cut.

    Attributes:
        buffers: the parameters of each flat buffer. A buffer is an optimizer group; under ZeRO-3
            it is a part of one.
        paddings: number of elements after each parameter of each buffer; None means no padding.
        is_zero3: True if each parameter is cut, not the buffer.
    """

    buffers: Sequence[Shapes]
    paddings: Sequence[Sequence[int]] | None
    ranks: int
    is_zero3: bool

    def fragments(self, buffer: int, rank: int, partition_elements: int) -> list[Fragment]:
        """The fragments in one rank's partition of a buffer. The last partition may be smaller."""
        sizes = {name: shape.numel() for name, shape in self.buffers[buffer].items()}
        fragments, position = list[Fragment](), 0
        if self.is_zero3:
            for name, size in sizes.items():
                part = zero3_part_elements(size, self.ranks)
                count = min(part, size - rank * part)
                if count > 0:
                    fragments.append(Fragment(name, rank * part, count, position))
                position += part
            return fragments
        begin, end = rank * partition_elements, (rank + 1) * partition_elements
        paddings = [0] * len(sizes) if self.paddings is None else self.paddings[buffer]
        for (name, size), padding in zip(sizes.items(), paddings, strict=True):
            first, last = max(position, begin), min(position + size, end)
            if first < last:
                fragments.append(Fragment(name, first - position, last - first, first - begin))
            position += size + padding
        return fragments


def zero3_part_elements(elements: int, ranks: int) -> int:
    """Number of elements of a parameter on each rank under ZeRO-3, padding included."""
    return -(-elements // ranks)


@dataclass
class ParameterState:
    """The optimizer's state of one parameter.

    Attributes:
        fragments: for each fragment, the index of its first element in the flattened parameter, and
            its tensors by key: the fp32 weights (`MASTER`) and the optimizer's, such as
            ``exp_avg``.
        scalars: state that is not one value for each element, such as ``step``.
    """

    shape: torch.Size
    group: int
    fragments: list[tuple[int, dict[str, torch.Tensor]]] = field(default_factory=list)
    scalars: dict[str, Any] = field(default_factory=dict)

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """The keys of the per-element state, with their types."""
        return {key: tensor.dtype for key, tensor in self.fragments[0][1].items()}

    def copy(self, key: str, first: int, target: torch.Tensor) -> None:
        """Fill the flat `target` from index `first` on. CheckpointError: elements are missing."""
        last, copied = first + target.numel(), 0
        for begin, tensors in self.fragments:
            source = tensors[key]
            left, right = max(first, begin), min(last, begin + source.numel())
            if left < right:
                target[left - first : right - first].copy_(source[left - begin : right - begin])
                copied += right - left
        if copied != target.numel():
            raise CheckpointError(
                f"a parameter of shape {tuple(self.shape)} has only {copied} of its elements "
                f"{first} to {last} in the checkpoint; this version of trialflow does not know the "
                "layout of the DeepSpeed version that saved it"
            )

    def full_tensor(self, key: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A new tensor of the parameter's shape; `dtype` defaults to the saved one."""
        tensor = torch.empty(self.shape.numel(), dtype=dtype or self.dtypes[key])
        self.copy(key, 0, tensor)
        return tensor.view(self.shape)


def parameters_from_partitions(
    buffers: Sequence[Shapes], optimizers: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, ParameterState], Groups]:
    """The parameters' state, and the optimizer's groups, from the partitions of all ranks.

    `buffers` are the parameters of each flat buffer, `optimizers` the saved states of the
    data-parallel ranks' ZeRO optimizers. Raises CheckpointError if the layout is unknown, or the
    state cannot be divided.
    """
    first = optimizers[0]
    is_zero3 = "fp32_flat_groups" in first
    masters, base_optimizer = zero_keys(is_zero3)
    if not isinstance(first[base_optimizer], Mapping):
        raise CheckpointError(
            "the checkpoint was saved with DeepSpeed's zero_optimization.elastic_checkpoint, "
            "which does not keep the optimizer's groups; load only the weights: "
            "searcher.source_weights_only=true"
        )
    groups: Groups = first[base_optimizer]["param_groups"]
    group_of = {buffer: i for i, group in enumerate(groups) for buffer in group["params"]}
    paddings = first.get("param_alignment_paddings")
    partitions = Partitions(buffers, paddings, len(optimizers), is_zero3)
    found: dict[str, ParameterState] = {}
    for buffer, shapes in enumerate(buffers):
        for name, shape in shapes.items():
            found[name] = ParameterState(shape, group_of[buffer])
        # Rank 0's partition is never padded unless it is the only one: no other rank's is larger.
        partition_elements = first[masters][buffer].numel()
        states = [each[base_optimizer]["state"].get(buffer, {}) for each in optimizers]
        cuts = [
            partitions.fragments(buffer, rank, partition_elements)
            for rank in range(len(optimizers))
        ]
        is_muon = not is_zero3 and bool(groups[group_of[buffer]].get("use_muon"))
        is_whole = is_muon and _holds_whole_momentum(shapes, cuts, states)
        for optimizer, fragments, state in zip(optimizers, cuts, states, strict=True):
            master = optimizer[masters][buffer].detach()
            padding = 0 if is_zero3 else optimizer["group_paddings"][buffer]
            _add_fragments(found, fragments, master, padding, state, is_whole)
    return found, groups


def parameters_from_full_state(
    module: Mapping[str, Any] | None,
    optimizer: Mapping[str, Any] | None,
    target_groups: Sequence[Shapes],
    names: Sequence[str] = (),
) -> tuple[dict[str, ParameterState], Groups]:
    """The parameters' state, and the optimizer's groups, as saved without ZeRO.

    `module` and `optimizer` are state dicts; the module's is None for a pipeline. `target_groups`
    are the parameters that the live engine trains, by optimizer group, since the optimizer's has
    indices in place of names; `names` has the name of each index, or is empty if they are not
    known. Raises CheckpointError if the state cannot be matched with the parameters.
    """
    unsupported = None
    if optimizer is None or "param_groups" not in optimizer:
        unsupported = "without ZeRO in 16 bits; DeepSpeed's format of these fp32 weights is unknown"
    elif module is None:
        unsupported = "without ZeRO by a pipeline, whose optimizer state has no parameter names"
    if optimizer is None or module is None or unsupported is not None:
        raise CheckpointError(
            f"the checkpoint was saved {unsupported}; resume with ZeRO stage 0, or load only the "
            "weights: searcher.source_weights_only=true"
        )
    groups: Groups = optimizer["param_groups"]
    require_group_count(len(groups), len(target_groups))
    found: dict[str, ParameterState] = {}
    places = list[tuple[int, int]]()
    for group, (saved, wanted) in enumerate(zip(groups, target_groups, strict=True)):
        indices = list(saved["params"])
        if len(indices) != len(wanted):  # frozen parameters have an index, but no state
            indices = [index for index in indices if index in optimizer["state"]]
        if len(indices) != len(wanted):
            raise CheckpointError(
                f"optimizer group {group} had {len(saved['params'])} parameters when the "
                f"checkpoint was saved, and has {len(wanted)} now; resume the same model with the "
                "same groups"
            )
        places += [(group, index) for index in indices]
    is_known = len(names) == sum(len(each["params"]) for each in groups)
    then = [names[index] for _, index in places] if is_known else []
    now = [*chain.from_iterable(target_groups)]
    for name, place in zip(now, saved_places(now, then), strict=True):
        if name not in module:
            raise CheckpointError(
                f"the checkpoint has no parameter {name}; resume the model that saved it"
            )
        group, index = places[place]
        state = optimizer["state"].get(index, {})
        found[name] = _full_parameter(name, module[name], group, state)
    return found, groups


def require_group_count(saved: int, now: int) -> None:
    """Check that the optimizer has as many groups as it had. Raises CheckpointError if not."""
    if saved != now:
        raise CheckpointError(
            f"the optimizer had {saved} groups of parameters when the checkpoint was saved, and "
            f"has {now} now; resume with the same groups"
        )


def _holds_whole_momentum(
    shapes: Shapes, cuts: Sequence[list[Fragment]], states: Sequence[Mapping[str, Any]]
) -> bool:
    """True if each rank holds Muon's momentum of whole parameters, not of its partition."""
    expected = [sum(shapes[each.name].numel() for each in fragments) for fragments in cuts]
    seen = [state[MUON_MOMENTUM].numel() if MUON_MOMENTUM in state else 0 for state in states]
    return seen == expected


def _add_fragments(
    found: Mapping[str, ParameterState],
    fragments: list[Fragment],
    master: torch.Tensor,
    padding: int,
    state: Mapping[str, Any],
    has_whole_momentum: bool,
) -> None:
    """Add one partition's fragments to the parameters in `found`.

    The optimizer's state has `padding` elements more than `master`.
    """
    size, position = master.numel(), 0
    if has_whole_momentum:
        momentum = state.get(MUON_MOMENTUM, master[:0])  # empty: no parameters on this rank
        state = {key: value for key, value in state.items() if key != MUON_MOMENTUM}
    tensors, scalars = _split_state(state, (size, size + padding))
    for fragment in fragments:
        end = fragment.offset + fragment.count
        if end > size:
            raise CheckpointError(
                f"{fragment.name} was expected at {fragment.offset} to {end} of a partition that "
                f"has only {size} elements; this version of trialflow does not know the layout of "
                "the DeepSpeed version that saved the checkpoint"
            )
        views = {key: flat[fragment.offset : end] for key, flat in tensors.items()}
        views[MASTER] = master[fragment.offset : end]
        if has_whole_momentum:
            begin = position + fragment.first
            views[MUON_MOMENTUM] = momentum[begin : begin + fragment.count]
            position += found[fragment.name].shape.numel()
        found[fragment.name].scalars = scalars
        found[fragment.name].fragments.append((fragment.first, views))


def _split_state(
    state: Mapping[str, Any], sizes: tuple[int, int]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Split an optimizer's state of a flat tensor into per-element tensors, with one of `sizes`
    (without and with padding), and scalars."""
    tensors, scalars = {}, {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            scalars[key] = value
        elif value.dim() == 1 and value.numel() in sizes:
            tensors[key] = value
        else:
            raise CheckpointError(
                f"the optimizer's {key} has shape {tuple(value.shape)} for {sizes[0]} elements; "
                "only a scalar or one value for each element can be resharded; resume on as many "
                "ranks as saved it"
            )
    return tensors, scalars


def _full_parameter(
    name: str, weight: torch.Tensor, group: int, state: Mapping[str, Any]
) -> ParameterState:
    tensors = {key: value for key, value in state.items() if key != "step"}
    for key, value in tensors.items():
        if getattr(value, "shape", None) != weight.shape:
            raise CheckpointError(
                f"the optimizer's {key} of {name} does not have the parameter's shape "
                f"{tuple(weight.shape)}, so it cannot be resharded; resume with ZeRO stage 0"
            )
    flat = {key: value.reshape(-1) for key, value in {MASTER: weight, **tensors}.items()}
    scalars = {key: value for key, value in state.items() if key == "step"}
    return ParameterState(weight.shape, group, [(0, flat)], scalars)
