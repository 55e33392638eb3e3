"""The time of forward passes, which tells the rank that computes slowest."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import nn

from trial_core.rank.forward_time import TIMED_PASSES, ForwardClock

SECONDS = 0.01


class Slow(nn.Linear):
    """A pass takes at least `SECONDS`."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(SECONDS)
        return super().forward(inputs)


def test_forward_passes_that_train_are_timed() -> None:
    """Not those of a validation; and so many of a workload."""
    model, inputs = Slow(2, 2), torch.ones(1, 2)
    clock = ForwardClock([model])
    assert clock.seconds() == 0
    model.eval()(inputs)
    with torch.no_grad():
        model.train()(inputs)
    assert clock.seconds() == 0
    for _ in range(TIMED_PASSES + 1):
        model(inputs)
    assert clock.seconds() >= SECONDS
    assert len(clock._passes) == TIMED_PASSES
    clock.begin_workload()
    assert clock.seconds() == 0


def test_a_copy_of_a_model_shares_the_clock() -> None:
    """As a callback makes it, for an average of weights."""
    model = nn.Linear(2, 2)
    clock = ForwardClock([model])
    copy.deepcopy(model)(torch.ones(1, 2))
    assert clock.seconds() > 0


class Model(nn.Sequential):
    """Torch 2.7 compiles no `forward` that is torch's."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * 2  # type: ignore


@pytest.mark.xdist_group("torch.compile")  # its first use in a process takes a second
def test_a_compiled_model_is_compiled_once() -> None:
    """`model.compile()` also traces the hooks, which must not change what is compiled."""
    model = Model(nn.Linear(2, 2))
    ForwardClock([model])
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        compiled.append(1)
        return graph.forward

    model.compile(backend=backend, fullgraph=True)
    for _ in range(5):
        model(torch.ones(1, 2))
    assert len(compiled) == 1
