"""Optimizers with two modes, such as those of ``schedulefree``.

In training mode, a parameter has the value at which gradients are computed; in evaluation mode,
the value to validate and to publish. The optimizer's methods ``train`` and ``eval`` switch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class WeightCopies:
    """This rank's copies of an optimizer's parameters, where a model computes with copies.

    `refresh` gives them the values of the parameters. It may be collective.
    """

    tensors: Sequence[torch.Tensor]
    refresh: Callable[[], None]


def with_modes(optimizers: Sequence[Any]) -> list[Any]:
    """Those of `optimizers` that have callable ``train`` and ``eval`` methods."""
    return [
        each
        for each in optimizers
        if callable(getattr(each, "train", None)) and callable(getattr(each, "eval", None))
    ]


def to_training_mode(optimizers: Sequence[Any], copies: Sequence[WeightCopies] = ()) -> None:
    """Switch optimizers with modes to training, in whichever mode a trial has left them."""
    for each in with_modes(optimizers):
        each.train()
    for copy in copies:
        copy.refresh()


@contextmanager
def optimizers_evaluating(
    optimizers: Sequence[Any], copies: Sequence[WeightCopies] = ()
) -> Iterator[list[torch.Tensor]]:
    """Inside the block, optimizers with modes are in evaluation mode; gives their parameters.

    Afterwards the parameters have exactly their values from before. Switching back alone would
    change them by rounding, so that a validation or a checkpoint would change the training. A trial
    may switch the modes itself inside the block. The same holds for the `copies` of parameters of
    these optimizers.
    """
    switched = with_modes(optimizers)
    to_training_mode(switched)
    parameters = [
        each for one in switched for group in one.param_groups for each in group["params"]
    ]
    weights = [*parameters, *(each for copy in copies for each in copy.tensors)]
    kept = [each.detach().clone() for each in weights]
    for one in switched:
        one.eval()
    for copy in copies:
        copy.refresh()
    try:
        yield parameters
    finally:
        to_training_mode(switched)
        with torch.no_grad():
            for each, own in zip(weights, kept, strict=True):
                each.copy_(own)
