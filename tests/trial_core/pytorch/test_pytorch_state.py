"""The state of a PyTorchTrial in checkpoints, on a single rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from tests.support.tensors import differing
from trial_core.errors import CheckpointError
from trial_core.pytorch import PyTorchTrialContext
from trial_core.pytorch.pytorch_adapter import PyTorchTrialAdapter
from trial_core.pytorch.pytorch_state import load_gradients, load_state, read_state, state_of
from trial_core.rank.state_files.built_settings import BuiltSettings
from trial_core.rank.state_files.safe_load import Reader
from trial_core.rank.state_files.settings_parts import OptimizerPart


def context_of(*models: nn.Module, **checkpointing: Any) -> PyTorchTrialContext:
    """A context that has wrapped the models, and an optimizer that has stepped once for each."""
    context = PyTorchTrialContext.from_config({"checkpointing": checkpointing})
    for model in models:
        wrapped = context.wrap_model(model)
        optimizer = context.wrap_optimizer(Adam(wrapped.parameters(), lr=0.1))
        if any(each.requires_grad for each in wrapped.parameters()):
            with context.training_batch():
                context.backward(wrapped(torch.ones(4, 2)).square().sum())
                context.step_optimizer(optimizer)
    return context


def net(*, frozen: bool = False) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    model[0].requires_grad_(not frozen)
    return model


@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod."])
def test_states_with_and_without_the_prefix(prefix: str) -> None:
    """Determined's own files of several ranks, and of compiled models, have it."""
    saved, other = context_of(net()), context_of(net())
    state = state_of(saved)
    weights = state["models_state_dict"][0]
    renamed = {f"{prefix}{name}": value.clone() for name, value in weights.items()}
    load_state(other, {**state, "models_state_dict": [renamed]})
    assert differing(weights, state_of(other)["models_state_dict"][0]) == []
    exp_avg = [each.optimizers[0].state_dict()["state"][0]["exp_avg"] for each in (saved, other)]
    assert torch.equal(*exp_avg)


def test_a_model_whose_parts_are_all_called_module() -> None:
    """Its names begin with the prefix, too, and stay as they are."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 1)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.module(inputs)

    saved, other = context_of(Outer()), context_of(Outer())
    load_state(other, state_of(saved))
    assert torch.equal(saved.models[0].module.weight, other.models[0].module.weight)


def test_frozen_parameters_can_be_left_out() -> None:
    """And are then those that the trial builds; trained ones are restored."""
    saved = context_of(net(frozen=True), exclude_frozen_parameters=True)
    other = context_of(net(frozen=True), exclude_frozen_parameters=True)
    built = other.models[0][0].weight.clone()
    state = state_of(saved)
    assert sorted(state["models_state_dict"][0])[:2] == ["1.bias", "1.num_batches_tracked"]
    load_state(other, state)
    assert torch.equal(other.models[0][0].weight, built)
    assert torch.equal(other.models[0][2].weight, saved.models[0][2].weight)


class Named(nn.Sequential):
    """Layers of these names, in this order."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(2, 2))


def test_layers_in_another_order(tmp_path: Path) -> None:
    """Each keeps its moments, though the other has the same shape."""
    saved, other = context_of(Named("q", "k")), context_of(Named("k", "q"))
    (optimizer,), modules = saved.optimizers, saved.models
    (tmp_path / "trialflow").mkdir()
    BuiltSettings([OptimizerPart(optimizer, [], modules)]).write(tmp_path / "trialflow", {})
    adapter: Any = object.__new__(PyTorchTrialAdapter)
    adapter._context, adapter.modules = other, other.models
    adapter.optimizers = other.optimizers
    adapter.load(tmp_path, Reader(), state_of(saved))
    seen, expected = (
        {
            name: each.optimizers[0].state[parameter]["exp_avg"]
            for name, parameter in each.models[0].named_parameters()
        }
        for each in (other, saved)
    )
    assert differing(expected, seen) == []


def shorter(state: dict[str, Any]) -> None:
    state["optimizers_state_dict"].pop()


def narrower(state: dict[str, Any]) -> None:
    state["models_state_dict"][0]["2.weight"] = torch.ones(1, 2)


def other_names(state: dict[str, Any]) -> None:
    weights = state["models_state_dict"][0]
    weights["3.weight"] = weights.pop("2.weight")


def other_groups(state: dict[str, Any]) -> None:
    groups = state["optimizers_state_dict"][0]["param_groups"]
    groups.append(groups[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            shorter,
            "the checkpoint does not fit the trial: its optimizers_state_dict has 0 entries, and "
            "the trial has wrapped 1; wrap as many, in the same order",
        ),
        (narrower, "model 0 does not fit the checkpoint: Error(s) in loading state_dict for Seq"),
        (
            other_names,
            "model 0 (Sequential) does not fit the checkpoint, which lacks 2.weight and has also "
            "3.weight; resume with the model that was saved",
        ),
        (
            other_groups,
            "the checkpoint does not fit the trial: its optimizers_state_dict is refused by Adam: ",
        ),
    ],
)
def test_checkpoints_of_another_trial(
    change: Callable[[dict[str, Any]], None], message: str
) -> None:
    """Say what differs."""
    context = context_of(net())
    state = state_of(context)
    change(state)
    with pytest.raises(CheckpointError, match="^" + re.escape(message)):
        load_state(context, state)


def test_a_checkpoint_of_another_kind_of_trial(tmp_path: Path) -> None:
    """Has no such file."""
    message = "the checkpoint has no state_dict.pth: a PyTorchTrial did not save it; resume with"
    with pytest.raises(CheckpointError, match="^" + re.escape(message)):
        read_state(tmp_path, Reader())


def test_gradients_of_more_ranks_than_have_some(tmp_path: Path) -> None:
    """Four ranks have saved, two of them without gradients: a single rank gets the mean of four."""
    (tmp_path / "gradients").mkdir()
    for rank, value in ((1, 2.0), (3, 6.0)):
        content = {"ranks": 4, "models": [{"weight": torch.full((1, 2), value)}]}
        torch.save(content, tmp_path / "gradients" / f"rank-{rank:05d}.pt")
    context = PyTorchTrialContext.from_config({})
    model = context.wrap_model(nn.Linear(2, 1))
    context.wrap_optimizer(SGD(model.parameters(), lr=0.1))
    load_gradients(context, tmp_path, Reader())
    assert model.weight.grad.tolist() == [[2.0, 2.0]]
    assert model.bias.grad is None
