"""Times the forward passes of a rank's models, to find the rank that computes slowest.

A batch takes all ranks equally long, because each waits for the others when gradients are averaged.
The forward pass before that waits for none, if the model is whole on each rank. So a slow
accelerator, or a busy machine, shows in its time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trial_core.rank.collectives.accelerator import has_accelerator

TIMED_PASSES = 64
"""So many passes of a workload are timed, which costs little and tells enough."""


class ForwardClock:
    """Times forward passes that train and go through ``model(...)``, unlike a pipeline's."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._passes: list[tuple[Any, Any]] = []
        self._began: Any = None
        for model in models:
            model.register_forward_pre_hook(self._begin)
            model.register_forward_hook(self._end)

    def __deepcopy__(self, memo: Any) -> ForwardClock:
        """A copy of a model shares its clock."""
        return self

    def begin_workload(self) -> None:
        self._passes.clear()

    def seconds(self) -> float:
        """The mean time of a pass since `begin_workload`, or 0. May wait for the accelerator."""
        if not self._passes:
            return 0.0
        if not _has_events():
            return float(sum(end - begin for begin, end in self._passes) / len(self._passes))
        self._passes[-1][1].synchronize()
        return float(sum(b.elapsed_time(e) for b, e in self._passes) / len(self._passes) / 1000)

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():  # a traced hook would recompile the model
            return
        is_timed = model.training and torch.is_grad_enabled()
        self._began = _now() if is_timed and len(self._passes) < TIMED_PASSES else None

    def _end(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and self._began is not None:
            self._passes.append((self._began, _now()))
            self._began = None


def _has_events() -> bool:
    """True if this rank's accelerator can record the time of its work."""
    return has_accelerator() and torch.accelerator.is_available()


def _now() -> Any:
    """The time, or on an accelerator an event that will tell it."""
    if not _has_events():
        return time.perf_counter()
    event = torch.Event(enable_timing=True)
    event.record()
    return event
