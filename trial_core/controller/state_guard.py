"""Keeps what is trained while a checkpoint is loaded into it, and puts it back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

_PLAIN = (type(None), bool, int, float, complex, str)


class StateGuard:
    """The state of modules and optimizers on this rank, to be put back after a load.

    It needs as much of the host's memory as the state has.

    Args:
        modules: their parameters and buffers, of which a sharded one is this rank's part.
        optimizers: their states and groups.
    """

    def __init__(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self._modules = modules
        # A load gives an optimizer a new state and new groups. It fills the tensors that it finds.
        self._objects = [(each, each.state, each.param_groups) for each in optimizers]
        self._kept = {
            name: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
            for name, value in self._named()
        }

    def put_back(self, has_own_buffers: bool = True) -> list[str]:
        """Restore values, types and objects; names of what the load had changed.

        Args:
            has_own_buffers: False: buffers are not named, because another rank's replace them.
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
                for name, _ in each.named_buffers()
            }
            changed = [name for name in changed if name not in buffers]
        for optimizer, state, groups in self._objects:
            vars(optimizer).update(state=state, param_groups=groups)
        with torch.no_grad():
            for name, live in self._named():
                kept = self._kept.get(name)
                if isinstance(kept, torch.Tensor) and not _is_same(live, kept):
                    live.copy_(kept)
        return changed

    def _named(self) -> Iterator[tuple[str, Any]]:
        """All present tensors, this rank's parts of them, and numbers, by a name for people."""
        named: set[int] = set()
        for i, module in enumerate(self._modules):
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                named.add(id(tensor))
                yield _of_model(name, i), _own_part(tensor)
        for i, (optimizer, *_) in enumerate(self._objects):
            numbers: dict[Any, int] = {}
            for j, group in enumerate(optimizer.param_groups):
                settings = {key: value for key, value in group.items() if key != "params"}
                yield from _leaves(settings, f"group {j} of optimizer {i}")
                for parameter in group["params"]:
                    name = f"parameter {numbers.setdefault(parameter, len(numbers))}"
                    if id(parameter) not in named:  # ZeRO's, which are not the modules'
                        yield f"{name} of optimizer {i}", _own_part(parameter)
            for j, (owner, values) in enumerate(optimizer.state.items()):
                of = f"parameter {numbers[owner]}" if owner in numbers else f"entry {j}"
                yield from _leaves(values, f"{of} of optimizer {i}")


def _of_model(name: str, index: int) -> str:
    return f"{name} of model {index}"


def _leaves(value: Any, of: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        yield of, _own_part(value)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(each, f"{key} of {of}")
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from _leaves(each, f"{index} of {of}")
    elif isinstance(value, _PLAIN):
        yield of, value


def _own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor that FSDP2 or ZeRO-3 has divided."""
    if isinstance(tensor, DTensor):
        return tensor.to_local().detach()
    part: torch.Tensor = getattr(tensor, "ds_tensor", tensor)
    return part.detach()


def _is_same(value: Any, kept: Any) -> bool:
    """Whether type, shape and every bit are the same: a NaN equals itself."""
    if not isinstance(value, torch.Tensor) or not isinstance(kept, torch.Tensor):
        return type(value) is type(kept) and repr(value) == repr(kept)
    if (value.dtype, value.shape) != (kept.dtype, kept.shape):
        return False
    bits = [each.cpu().reshape(-1).contiguous().view(torch.uint8) for each in (value, kept)]
    return torch.equal(*bits)
