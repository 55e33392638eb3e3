"""Loads an optimizer's state into the tensors that it has.

`Optimizer.load_state_dict` replaces all tensors. On the device the old ones remain until the last
new one is, which doubles the state; on the CPU the new ones are those that were read, which may be
maps of a checkpoint's file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


@contextmanager
def optimizers_loaded_in_place(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Inside the block, `load_state_dict` copies saved values one by one into what is there."""
    with ExitStack() as stack:
        for optimizer in optimizers:
            handle = optimizer.register_load_state_dict_pre_hook(_with_own_tensors)
            stack.callback(handle.remove)
        yield


def _with_own_tensors(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """`state_dict` with the optimizer's tensors, filled with the saved values."""
    numbers = [group["params"] for group in state_dict["param_groups"]]
    parameters = [group["params"] for group in optimizer.param_groups]
    if list(map(len, numbers)) != list(map(len, parameters)):
        return None  # torch refuses it
    owners = dict(zip(chain(*numbers), chain(*parameters), strict=True))
    state = {
        number: _filled(optimizer.state.get(owners[number], {}), saved, owners[number].device)
        if number in owners and isinstance(saved, Mapping)
        else saved
        for number, saved in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


@torch.no_grad()
def _filled(
    present: Mapping[str, Any], saved: Mapping[str, Any], device: torch.device
) -> dict[str, Any]:
    """The state of one parameter.

    Args:
        device: the parameter's, for a tensor that is not present.
    """
    filled = dict(saved)
    for key, value in saved.items():
        own = present.get(key)
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            continue
        if isinstance(own, torch.Tensor) and (own.shape, own.dtype) == (value.shape, value.dtype):
            filled[key] = own.copy_(value)
        else:
            filled[key] = value.to(device if value.dim() else value.device, copy=True)
    return filled
