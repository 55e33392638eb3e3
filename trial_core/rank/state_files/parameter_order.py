"""Gives an optimizer's parameters the states that were saved for their names.

`Optimizer.load_state_dict` goes by the parameters' order. If a model defines its layers in another
order now, their weights are loaded by name, but they would get the moments of others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trial_core.errors import CheckpointError
from trial_core.rank.state_files.compiled_names import COMPILED

_PER_ELEMENT = frozenset({
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg",
    "grad_avg", "acc_delta", "sum", "prev", "step_size", "ax",
})  # fmt: skip
"""Entries of which torch's own optimizers have one value for each element of a parameter."""


def parameter_names(optimizer: Optimizer, modules: Iterable[nn.Module]) -> list[str]:
    """The names of an optimizer's parameters, in its order; empty if one is in no module."""
    return names_in(modules, _parameters(optimizer))


def names_in(modules: Iterable[nn.Module], parameters: Iterable[Any]) -> list[str]:
    """The names of parameters; empty if one is in no module.

    Of the names of a tied parameter, the first in the alphabet, in whatever order they are defined.
    """
    names: dict[int, list[str]] = defaultdict(list)
    for index, module in enumerate(modules):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names[id(parameter)].append(f"{name.replace(COMPILED, '')} of model {index}")
    own = [min(names.get(id(each), [""])) for each in parameters]
    return own if all(own) else []


def names_of_model(saved: Iterable[Sequence[str]], index: int) -> list[str]:
    """Of the `parameter_names` of optimizers, those of the model's, as the model has them."""
    suffix = f" of model {index}"
    found = (each for each in saved if each and all(name.endswith(suffix) for name in each))
    return [name.removesuffix(suffix) for name in next(found, ())]


def saved_places(now: Sequence[str], then: Sequence[str]) -> list[int]:
    """For each parameter, the place of its state in the checkpoint: that of its name.

    Parameters whose names the checkpoint lacks have the places whose names are gone, in their
    order: they may be renamed. Without the names of then, each has its own place.
    """
    places, names = {name: place for place, name in enumerate(then)}, {*now}
    if not len(now) == len(names) == len(then) == len(places):
        return [*range(len(now))]
    left = iter([place for name, place in places.items() if name not in names])
    return [places[name] if name in places else next(left) for name in now]


@contextmanager
def states_by_name(
    optimizers: Sequence[Optimizer], modules: Sequence[nn.Module], saved: Sequence[Sequence[str]]
) -> Iterator[None]:
    """Inside the block, `load_state_dict` gives each parameter the state of its name.

    `saved` has the `parameter_names` of each optimizer in the checkpoint, as far as they are known.
    `load_state_dict` raises CheckpointError if a state has another shape than its parameter.
    """
    with ExitStack() as stack:
        for index, optimizer in enumerate(optimizers):
            if now := parameter_names(optimizer, modules):
                then = saved[index] if index < len(saved) else ()
                hook = optimizer.register_load_state_dict_pre_hook(partial(_reordered, now, then))
                stack.callback(hook.remove)
        yield


def _reordered(
    now: Sequence[str], then: Sequence[str], optimizer: Optimizer, state_dict: dict[str, Any]
) -> dict[str, Any] | None:
    """`state_dict` with the numbers of its parameters in the order of `now`."""
    groups = state_dict["param_groups"]
    numbers = [*chain.from_iterable(group["params"] for group in groups)]
    if len(numbers) != len(now):
        return None  # torch refuses it
    numbers = [numbers[place] for place in saved_places(now, then)]
    if type(optimizer).__module__.startswith(("torch.optim.", "deepspeed.ops.adam.")):
        for name, parameter, number in zip(now, _parameters(optimizer), numbers, strict=True):
            _require_shape(name, parameter.shape, state_dict["state"].get(number))
    left = iter(numbers)
    ordered = [{**each, "params": [*islice(left, len(each["params"]))]} for each in groups]
    return {**state_dict, "param_groups": ordered}


def _require_shape(name: str, shape: torch.Size, saved: Any) -> None:
    for key, value in saved.items() if isinstance(saved, Mapping) else ():
        is_per_element = key in _PER_ELEMENT and isinstance(value, torch.Tensor) and value.dim() > 0
        if is_per_element and value.shape != shape:
            raise CheckpointError(
                f"the checkpoint has an {key} of the shape {tuple(value.shape)} for {name}, whose "
                f"shape is {tuple(shape)}: it is the state of another parameter. Define the "
                "layers, and give them to the optimizer, in the order in which they were saved; or "
                "begin a new trial with the checkpoint's weights: searcher.source_checkpoint_uuid "
                "and searcher.source_weights_only=true"
            )


def _parameters(optimizer: Optimizer) -> Iterator[Any]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)
