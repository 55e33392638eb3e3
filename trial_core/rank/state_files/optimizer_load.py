"""Loads an optimizer's state into the tensors that it has, in the types that were saved.

`Optimizer.load_state_dict` replaces all tensors. On the device the old tensors remain until the
last new one exists, which doubles the state. On the CPU the new ones are the tensors as read, which
may be maps of a checkpoint's file. It also casts every tensor except ``step`` to the type of the
parameter: a momentum of 16 or 8 bits would come back as one of 32.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trial_core.rank.state_files.state_guard import with_inner

_STEP = "step"
"""torch knows on which device its optimizers need this entry, and keeps its type."""


@contextmanager
def optimizers_loaded_in_place(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Inside the block, `load_state_dict` copies saved values one by one into the present tensors.

    A saved value of another type or shape replaces the present one.
    """
    with ExitStack() as stack:
        for optimizer in with_inner(optimizers):
            load = _Load()
            before = optimizer.register_load_state_dict_pre_hook(load.fill)
            after = optimizer.register_load_state_dict_post_hook(load.put_in, prepend=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
        yield


class _Load:
    """One load of one optimizer: both hooks of its `load_state_dict`."""

    def __init__(self) -> None:
        self._states: dict[Any, Any] = {}  # by the parameter, or another key

    def fill(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """`state_dict` with the optimizer's tensors, filled with the saved values."""
        self._states = {}
        numbers = [group["params"] for group in state_dict["param_groups"]]
        parameters = [group["params"] for group in optimizer.param_groups]
        if list(map(len, numbers)) != list(map(len, parameters)):
            return None  # torch refuses it
        owners = dict(zip(chain(*numbers), chain(*parameters), strict=True))
        given: dict[Hashable, Any] = {}
        for number, saved in state_dict["state"].items():
            owner: Any = owners.get(number, number)
            device = owner.device if isinstance(owner, torch.Tensor) else torch.device("cpu")
            filled = _filled(optimizer.state.get(owner), saved, device)
            self._states[owner] = filled
            given[number] = _without_casts(filled, owner)
        return {**state_dict, "state": given}

    def put_in(self, optimizer: Optimizer) -> None:
        """Replace what torch has cast. Before other hooks, so that they see the state."""
        for owner, filled in self._states.items():
            optimizer.state[owner] = _uncast(optimizer.state.get(owner), filled)
        self._states = {}
        # Once more: the first call has seen empty tensors.
        optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


@torch.no_grad()
def _filled(present: Any, saved: Any, device: torch.device, key: Hashable = None) -> Any:
    """`saved` in the tensors of `present`, which has the same structure, or a part of it.

    `device` is for a tensor that is not present, `key` the value's key in the state.
    """
    if isinstance(saved, torch.Tensor):
        if isinstance(saved, DTensor):  # newly allocated for this load
            return saved
        if (
            isinstance(present, torch.Tensor)
            and not isinstance(present, DTensor)
            and (present.shape, present.dtype) == (saved.shape, saved.dtype)
        ):
            return present.copy_(saved)
        return saved.to(saved.device if key == _STEP else device, copy=True)
    if isinstance(saved, Mapping):
        own = present if isinstance(present, Mapping) else {}
        return {name: _filled(own.get(name), each, device, name) for name, each in saved.items()}
    if type(saved) in (list, tuple):
        alike = type(present) is type(saved) and len(present) == len(saved)
        others = present if alike else [None] * len(saved)
        return type(saved)(
            _filled(own, each, device) for own, each in zip(others, saved, strict=True)
        )
    return saved


def _without_casts(value: Any, owner: Any, key: Hashable = None) -> Any:
    """`value`, with an empty tensor for each that torch would copy to cast it."""
    if isinstance(value, torch.Tensor):
        is_cast = key != _STEP and isinstance(owner, torch.Tensor) and value.dtype != owner.dtype
        return torch.empty(0, dtype=owner.dtype, device=owner.device) if is_cast else value
    if isinstance(value, dict):
        return {name: _without_casts(each, owner, name) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_casts(each, owner) for each in value)
    return value


def _uncast(loaded: Any, filled: Any, key: Hashable = None) -> Any:
    """`loaded`, which torch and the optimizer have made of `filled`, with the tensors of `filled`.

    Other values are the optimizer's: it may have converted values of an earlier version.
    """
    if isinstance(filled, torch.Tensor):
        return loaded if key == _STEP else filled
    if isinstance(filled, dict) and isinstance(loaded, dict):
        return {
            name: _uncast(each, filled[name], name) if name in filled else each
            for name, each in loaded.items()
        }
    if type(filled) in (list, tuple) and type(loaded) is type(filled):
        return type(filled)(map(_uncast, loaded, filled))
    return filled if isinstance(filled, str) else loaded  # torch makes a text of an iterator of it
