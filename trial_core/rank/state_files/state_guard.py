"""Keeps the trained state while a checkpoint is loaded into it, and puts it back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

_PLAIN = (type(None), bool, int, float, complex, str)


class StateGuard:
    """The state of modules and optimizers on this rank, to be put back after a load.

    Tensors without memory and sparse tensors are left out: no checkpoint holds their bits. Of
    sharded modules, this rank's part is kept. `left_out` has the names of each module's parameters
    that the checkpoint leaves out.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        left_out: Sequence[Collection[str]] = (),
    ) -> None:
        self._modules = modules
        self._left_out = [*left_out, *[()] * (len(modules) - len(left_out))]
        # A load gives an optimizer a new state and new groups. It fills the tensors that it finds.
        # By reference: SAM and Lookahead share their groups with the optimizers that they wrap.
        self._attributes = [(each, dict(vars(each))) for each in with_inner(optimizers)]
        # ZeRO-3 has parameters in its groups only while it loads and steps. One that stayed there
        # would be stepped with each other group.
        self._groups = [
            (group, dict(group), [*group["params"]])
            for optimizer, _ in self._attributes
            for group in optimizer.param_groups
        ]
        self._kept: dict[str, Any] = {}

    def size_bytes(self) -> int:
        """The host memory that `keep` needs."""
        values = (value for _, value in self._named())
        return sum(each.nbytes for each in values if isinstance(each, torch.Tensor))

    def keep(self) -> None:
        """Copy the state. Raises RuntimeError or TypeError for a tensor that cannot be copied."""
        self._kept = {
            name: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
            for name, value in self._named()
        }
        for value in self._kept.values():
            if isinstance(value, torch.Tensor):
                _bits(value)  # it will be compared

    def put_back(self, has_own_buffers: bool = True) -> list[str]:
        """Restore values, types and objects; return the names of values that the load changed.

        Without `has_own_buffers`, buffers are not named, because another rank's replace them.
        """
        loaded = dict(self._named())
        changed = [
            name
            for name in dict.fromkeys([*self._kept, *loaded])
            if not (name in loaded and name in self._kept)
            or not _is_same(loaded[name], self._kept[name])
        ]
        if not has_own_buffers:
            buffers = {
                _of_model(name, i)
                for i, each in enumerate(self._modules)
                for name, _ in persistent_buffers(each)
            }
            changed = [name for name in changed if name not in buffers]
        for optimizer, attributes in self._attributes:
            vars(optimizer).clear()
            vars(optimizer).update(attributes)
        for group, values, parameters in self._groups:
            group.clear()
            group.update(values)
            group["params"][:] = parameters
        with torch.no_grad():
            for name, live in self._named():
                kept = self._kept.get(name)
                if isinstance(kept, torch.Tensor) and not _is_same(live, kept):
                    live.copy_(kept)
        return changed

    def _saved_by_name(self, index: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters and buffers of a module that a checkpoint holds, each once."""
        module = self._modules[index]
        for name, parameter in module.named_parameters():
            if name not in self._left_out[index]:
                yield name, parameter
        yield from persistent_buffers(module)

    def _named(self) -> Iterator[tuple[str, Any]]:
        """All present tensors, this rank's parts of them, and numbers, by a name for people."""
        named: set[int] = set()
        for i in range(len(self._modules)):
            for name, tensor in self._saved_by_name(i):
                named.add(id(tensor))
                if has_bits(tensor):
                    yield _of_model(name, i), own_part(tensor)
        for i, (optimizer, _) in enumerate(self._attributes):
            numbers: dict[Any, int] = {}
            for j, group in enumerate(optimizer.param_groups):
                settings = {key: value for key, value in group.items() if key != "params"}
                yield from _leaves(settings, f"group {j} of optimizer {i}")
                for parameter in group["params"]:
                    name = f"parameter {numbers.setdefault(parameter, len(numbers))}"
                    if id(parameter) not in named and has_bits(parameter):  # ZeRO's own
                        yield f"{name} of optimizer {i}", own_part(parameter)
            for j, (owner, values) in enumerate(optimizer.state.items()):
                of = f"parameter {numbers[owner]}" if owner in numbers else f"entry {j}"
                yield from _leaves(values, f"{of} of optimizer {i}")


def with_inner(optimizers: Iterable[Optimizer]) -> Iterator[Optimizer]:
    """Optimizers, each before the ones that it wraps, as SAM and Lookahead do."""
    seen: set[int] = set()
    left = [*optimizers][::-1]
    while left:
        optimizer = left.pop()
        if id(optimizer) not in seen:
            seen.add(id(optimizer))
            yield optimizer
            left += [each for each in vars(optimizer).values() if isinstance(each, Optimizer)]


def _of_model(name: str, index: int) -> str:
    return f"{name} of model {index}"


def _leaves(value: Any, of: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        if has_bits(value):
            yield of, own_part(value)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(each, f"{key} of {of}")
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from _leaves(each, f"{index} of {of}")
    elif isinstance(value, _PLAIN):
        yield of, value


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that FSDP2 or ZeRO-3 has divided."""
    if isinstance(tensor, DTensor):
        return tensor.to_local().detach()
    part: torch.Tensor = getattr(tensor, "ds_tensor", tensor)
    return part.detach()


def _is_same(value: Any, kept: Any) -> bool:
    """True if type, shape and every bit are the same: a NaN equals itself."""
    if not isinstance(value, torch.Tensor) or not isinstance(kept, torch.Tensor):
        return type(value) is type(kept) and repr(value) == repr(kept)
    if (value.dtype, value.shape) != (kept.dtype, kept.shape):
        return False
    return torch.equal(_bits(value), _bits(kept))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
    return flat.view(torch.uint8)


def has_bits(tensor: torch.Tensor) -> bool:
    """False for tensors without memory and sparse ones, which have no single storage."""
    return not (is_lazy(tensor) or tensor.is_meta or tensor.layout is not torch.strided)


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers in a module's ``state_dict`` by their names, each once."""
    seen: set[int] = set()
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is None or name in part._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            yield f"{prefix}.{name}" if prefix else name, buffer
