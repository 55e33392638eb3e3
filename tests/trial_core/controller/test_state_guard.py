"""What is trained is put back after a load, whatever the load has done to it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.toy.odd_optimizer import OddOptimizer
from trial_core.controller.optimizer_load import optimizers_loaded_in_place
from trial_core.controller.state_guard import StateGuard


def trained() -> tuple[nn.Module, OddOptimizer]:
    """A model with buffers, one of them NaN, and an optimizer with states of all kinds."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model.register_buffer("unknown", torch.tensor(float("nan")))
    optimizer = OddOptimizer(model.parameters())
    for _ in range(3):
        model(torch.randn(6, 3)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def seen(model: nn.Module, optimizer: Any) -> list[Any]:
    """Identities and content of everything."""
    content = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    state = [id(value) for each in optimizer.state.values() for value in each.values()]
    groups = [id(each) for each in optimizer.param_groups]
    return [repr(content), state, groups, id(optimizer.state), id(optimizer.param_groups)]


def buffers(model: Any, optimizer: OddOptimizer) -> None:
    model[1].running_mean += 1


def weights(model: Any, optimizer: OddOptimizer) -> None:
    with torch.no_grad():
        model[2].weight[0, 1] = -model[2].weight[0, 1]


def types(model: nn.Module, optimizer: OddOptimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())  # torch casts


def in_place(model: nn.Module, optimizer: OddOptimizer) -> None:
    for state in optimizer.state.values():
        state["nested"]["parts"][1][0].zero_()


def settings(model: nn.Module, optimizer: OddOptimizer) -> None:
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.5
    saved["state"] = {}
    optimizer.load_state_dict(saved)


@pytest.mark.parametrize(
    ("load", "name"),
    [
        (buffers, "1.running_mean of model 0"),
        (weights, "2.weight of model 0"),
        (types, "momentum of parameter 0 of optimizer 0"),
        (in_place, "0 of 1 of parts of nested of parameter 3 of optimizer 0"),
        (settings, "lr of group 0 of optimizer 0"),
    ],
)
def test_what_a_load_changes_is_put_back_and_named(load: Any, name: str) -> None:
    """Values, types and objects."""
    model, optimizer = trained()
    before = seen(model, optimizer)
    guard = StateGuard([model], [optimizer])
    load(model, optimizer)
    assert seen(model, optimizer) != before
    assert name in guard.put_back()
    assert seen(model, optimizer) == before


def test_an_exact_load_is_not_named() -> None:
    """A NaN equals itself. An optimizer's objects are put back all the same."""
    model, optimizer = trained()
    before, guard = seen(model, optimizer), StateGuard([model], [optimizer])
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    with optimizers_loaded_in_place([optimizer]):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert seen(model, optimizer) != before
    assert guard.put_back() == []
    assert seen(model, optimizer) == before


def test_buffers_that_another_rank_replaces_are_put_back_without_a_word() -> None:
    """All other values are named."""
    model, optimizer = trained()
    before, guard = seen(model, optimizer), StateGuard([model], [optimizer])
    buffers(model, optimizer)
    weights(model, optimizer)
    assert guard.put_back(has_own_buffers=False) == ["2.weight of model 0"]
    assert seen(model, optimizer) == before
