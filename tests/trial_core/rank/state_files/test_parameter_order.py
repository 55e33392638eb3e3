"""Parameters get the states that were saved for their names, in whatever order they are."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, Optimizer

from trial_core.errors import CheckpointError
from trial_core.rank.state_files.built_settings import (
    BuiltSettings,
    read_parameters,
    read_settings,
)
from trial_core.rank.state_files.optimizer_load import optimizers_loaded_in_place
from trial_core.rank.state_files.parameter_order import (
    parameter_names,
    saved_places,
    states_by_name,
)
from trial_core.rank.state_files.settings_parts import OptimizerPart


class Layers(nn.Module):
    """Layers of these names, in this order; `width` outputs of the one called k."""

    def __init__(self, *names: str, width: int = 3) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(3, width if name == "k" else 3, bias=False))


def adam(model: nn.Module, step: float = 0.0) -> Adam:
    """With a moment of its own for each name, if it has made a step."""
    optimizer = Adam(model.parameters(), lr=0.1)
    for name, parameter in model.named_parameters() if step else ():
        parameter.grad = torch.full_like(parameter, step * ord(name[0]))
    optimizer.step()
    return optimizer


def moments(optimizer: Optimizer, model: nn.Module) -> dict[str, float]:
    return {
        name: round(optimizer.state[parameter]["exp_avg"].mean().item(), 3)
        for name, parameter in model.named_parameters()
    }


def load(target: Optimizer, model: nn.Module, state: Any, saved: Sequence[Sequence[str]]) -> None:
    with states_by_name([target], [model], saved), optimizers_loaded_in_place([target]):
        target.load_state_dict(copy.deepcopy(state))


@pytest.mark.parametrize("width", [3, 5])
@pytest.mark.parametrize("steps", [0.0, 9.0], ids=["without state", "with state"])
def test_layers_in_another_order_keep_their_moments(
    tmp_path: Path, width: int, steps: float
) -> None:
    """Of the same shapes and of others, through the file of the settings."""
    before, after = Layers("q", "k", "v", width=width), Layers("k", "v", "q", width=width)
    saved, target = adam(before, 1.0), adam(after, steps)
    (tmp_path / "file").mkdir()
    BuiltSettings([OptimizerPart(saved, [], [before])]).write(tmp_path / "file", {})
    load(target, after, saved.state_dict(), read_parameters(tmp_path / "file"))
    assert moments(target, after) == moments(saved, before)
    assert target.state_dict()["param_groups"] == saved.state_dict()["param_groups"]


def test_a_parameter_in_another_group_keeps_its_moments() -> None:
    """The groups are those of the checkpoint, by their place."""
    before, after = Layers("q", "k", "v"), Layers("q", "k", "v")
    saved = adam(before, 1.0)
    names = [[f"{name}.weight of model 0" for name in "qkv"]]
    q, k, v = after.parameters()
    target = Adam([{"params": [v]}, {"params": [q, k]}], lr=0.1)
    state = saved.state_dict()
    (group,) = state["param_groups"]
    state["param_groups"] = [{**group, "params": [0]}, {**group, "params": [1, 2]}]
    load(target, after, state, names)
    assert moments(target, after) == moments(saved, before)


def test_a_tied_parameter_is_known_by_one_of_its_names() -> None:
    """The same one in each order."""
    one, other = Layers("q", "k"), Layers("k", "q")
    for each in (one, other):
        each.k.weight = each.q.weight  # type: ignore[union-attr, assignment]
    names = [parameter_names(adam(each), [each]) for each in (one, other)]
    assert names == [["k.weight of model 0"]] * 2


def test_a_parameter_of_no_model_leaves_the_order() -> None:
    """Its name is not known."""
    model = Layers("q")
    optimizer = Adam([*model.parameters(), nn.Parameter(torch.zeros(1))])
    assert parameter_names(optimizer, [model]) == []


@pytest.mark.parametrize(
    ("then", "places"),
    [
        ("abc", [2, 0, 1]),
        ("xbc", [2, 0, 1]),
        ("ab", [0, 1, 2]),
        ("aab", [0, 1, 2]),
        ("", [0, 1, 2]),
    ],
)
def test_which_state_a_parameter_gets(then: str, places: list[int]) -> None:
    """That of its name; else that of a name that is gone; and its own if names are not known."""
    assert saved_places("cab", then) == places


def test_renamed_parameters_are_told(tmp_path: Path) -> None:
    """They have the state of a name that is gone, by its place."""
    before, after = Layers("q", "k", "v"), Layers("v", "x", "y")
    BuiltSettings([OptimizerPart(adam(before), [], [before])]).write(tmp_path, {})
    saved = read_settings(tmp_path)
    assert saved is not None
    told = BuiltSettings([OptimizerPart(adam(after), [], [after])]).apply(saved)
    assert told.kept == [
        "optimizer 0 (Adam): the state of q.weight of model 0 for x.weight of model 0, k.weight of "
        "model 0 for y.weight of model 0, because the checkpoint has none of that name"
    ]


def test_a_state_of_another_shape_is_refused() -> None:
    """Of a checkpoint without names, before any value changes; torch would fail in a step."""
    before, after = Layers("q", "k", width=5), Layers("k", "q", width=5)
    target = adam(after, 9.0)
    held = moments(target, after)
    with pytest.raises(CheckpointError, match=r"an exp_avg of the shape \(3, 3\) for k\.weight"):
        load(target, after, adam(before, 1.0).state_dict(), [])
    assert moments(target, after) == held
