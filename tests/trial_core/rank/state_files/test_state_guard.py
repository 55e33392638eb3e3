"""What is trained is put back after a load, whatever the load has done to it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.toy.odd_optimizer import OddOptimizer
from trial_core.rank.state_files.optimizer_load import optimizers_loaded_in_place
from trial_core.rank.state_files.state_guard import StateGuard


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


def kept(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> StateGuard:
    guard = StateGuard([model], [optimizer], **options)
    guard.keep()
    return guard


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
    guard = kept(model, optimizer)
    load(model, optimizer)
    assert seen(model, optimizer) != before
    assert name in guard.put_back()
    assert seen(model, optimizer) == before


def test_an_exact_load_is_not_named() -> None:
    """A NaN equals itself. An optimizer's objects are put back all the same."""
    model, optimizer = trained()
    before, guard = seen(model, optimizer), kept(model, optimizer)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    with optimizers_loaded_in_place([optimizer]):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert seen(model, optimizer) != before
    assert guard.put_back() == []
    assert seen(model, optimizer) == before


def test_buffers_that_another_rank_replaces_are_put_back_without_a_word() -> None:
    """All other values are named."""
    model, optimizer = trained()
    before, guard = seen(model, optimizer), kept(model, optimizer)
    buffers(model, optimizer)
    weights(model, optimizer)
    assert guard.put_back(has_own_buffers=False) == ["2.weight of model 0"]
    assert seen(model, optimizer) == before


def test_groups_that_a_load_fills_are_empty_again() -> None:
    """ZeRO-3 empties its groups between steps; its load leaves parameters in the old ones."""
    model = nn.Linear(3, 1)
    optimizer = OddOptimizer([{"params": [each]} for each in model.parameters()])
    first, other = optimizer.param_groups
    first["params"], emptied = [], other["params"]
    emptied.clear()
    guard = kept(model, optimizer)
    first["params"], first["lr"] = [model.weight], 0.5
    emptied.append(model.bias)
    optimizer.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    guard.put_back()
    assert optimizer.param_groups[0] is first
    assert first["params"] == other["params"] == []
    assert other["params"] is emptied
    assert first["lr"] == other["lr"]


class Wrapping(torch.optim.Optimizer):
    """Steps with another optimizer, whose groups it shares: as SAM does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.inner = OddOptimizer(self.param_groups)
        self.param_groups = self.inner.param_groups

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.inner.param_groups = self.param_groups


def test_an_optimizer_that_wraps_another_keeps_its_shared_groups() -> None:
    """A schedule would change the rate of one of them alone."""
    model = nn.Linear(3, 1)
    optimizer = Wrapping(model.parameters())
    before, guard = optimizer.param_groups, kept(model, optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.param_groups is not before
    assert guard.put_back() == []
    assert optimizer.param_groups is optimizer.inner.param_groups is before


def test_tensors_that_have_no_bits_of_their_own_are_left_out() -> None:
    """Sparse ones, those without memory, and what a load does not touch."""
    model = nn.Sequential(nn.Linear(3, 2), nn.LazyLinear(2))
    for name, buffer in {
        "adjacency": torch.eye(3).to_sparse(),
        "later": torch.empty(2, device="meta"),
        "turned": torch.ones(2, dtype=torch.complex64).conj(),
    }.items():
        model.register_buffer(name, buffer)
    model.register_buffer("cache", torch.ones(2**20), persistent=False)
    optimizer = OddOptimizer(model[0].parameters())
    guard = kept(model, optimizer)
    assert guard.size_bytes() < 1000
    assert guard.put_back() == []


def test_frozen_weights_that_a_checkpoint_does_not_hold_are_not_copied() -> None:
    """A large base model under an adapter would be there twice."""
    model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1))
    model[0].requires_grad_(False)
    optimizer = OddOptimizer(model[1].parameters())
    assert StateGuard([model], [optimizer]).size_bytes() > 4_000_000
    assert StateGuard([model], [optimizer], left_out=[{"0.weight", "0.bias"}]).size_bytes() < 10_000
