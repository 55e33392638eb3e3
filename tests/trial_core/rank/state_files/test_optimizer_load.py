"""Optimizers are restored into the tensors that they have."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.fake_accelerator import Memory
from tests.support.toy.odd_optimizer import OddOptimizer
from trial_core.rank.state_files.optimizer_load import optimizers_loaded_in_place
from trial_core.rank.state_files.safe_load import Reader

WIDTH = 1000


def optimizer(steps: int, seed: int = 0) -> torch.optim.Adam:
    """Of three parameters, one without gradients; trained for some steps."""
    generator = torch.Generator().manual_seed(seed)
    parameters = [torch.nn.Parameter(torch.zeros(WIDTH)) for _ in range(3)]
    groups: list[Any] = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.1}]
    adam = torch.optim.Adam(groups, lr=0.01 * (seed + 1))
    for _ in range(steps):
        for parameter in parameters[1:]:
            parameter.grad = torch.randn(WIDTH, generator=generator)
        adam.step()
    return adam


def load(target: torch.optim.Optimizer, state: Any) -> None:
    with optimizers_loaded_in_place([target]):
        target.load_state_dict(state)


def flat(adam: torch.optim.Adam) -> dict[Any, Any]:
    state: Any = adam.state_dict()
    entries = {(n, key): v for n, each in state["state"].items() for key, v in each.items()}
    return {**entries, "groups": state["param_groups"]}


@pytest.mark.parametrize("steps", [0, 3], ids=["without state", "with state"])
def test_the_state_is_that_of_a_usual_load(steps: int) -> None:
    """Values, learning rates, and the entries that an optimizer without state lacks."""
    saved, expected = optimizer(5, seed=1).state_dict(), optimizer(steps)
    expected.load_state_dict(copy.deepcopy(saved))
    seen = optimizer(steps)
    load(seen, saved)
    torch.testing.assert_close(flat(seen), flat(expected), rtol=0, atol=0)


def test_a_load_does_not_double_the_state() -> None:
    """Not even for one tensor: moments that DeepSpeed has linked to stay where they are."""
    saved, target = optimizer(5, seed=1).state_dict(), optimizer(3)
    before = {id(value) for key, value in flat(target).items() if key != "groups"}
    with Memory() as memory:
        load(target, saved)
    assert memory.peak_bytes == 0
    assert {id(value) for key, value in flat(target).items() if key != "groups"} == before


def test_no_tensor_remains_in_the_file(tmp_path: Path) -> None:
    """The file is deleted; a map would keep its space until the rank ends."""
    torch.save(optimizer(5, seed=1).state_dict(), tmp_path / "state.pt")
    targets = [optimizer(0), optimizer(3)]
    for target in targets:
        load(target, Reader().load_mapped(tmp_path / "state.pt"))
    expected = [copy.deepcopy(flat(target)) for target in targets]
    with (tmp_path / "state.pt").open("r+b") as file:  # a map would change with it
        file.write(b"\0" * (tmp_path / "state.pt").stat().st_size)
    seen = [flat(target) for target in targets]
    torch.testing.assert_close(seen, expected, rtol=0, atol=0)


def test_a_state_of_other_groups_is_refused() -> None:
    """By torch, before any value changes."""
    saved, target = optimizer(5, seed=1).state_dict(), optimizer(3)
    saved["param_groups"].pop()
    before = copy.deepcopy(flat(target))
    with pytest.raises(ValueError, match="different number of parameter groups"):
        load(target, saved)
    torch.testing.assert_close(flat(target), before, rtol=0, atol=0)


def odd(steps: int) -> OddOptimizer:
    sizes = (6, 9)
    return trained(OddOptimizer([torch.nn.Parameter(torch.ones(size)) for size in sizes]), steps)


def trained(optimizer: OddOptimizer, steps: int) -> OddOptimizer:
    for step in range(steps):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.linspace(-step, 1, parameter.numel())
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("steps", [0, 2], ids=["without state", "with state"])
def test_states_keep_their_types(tmp_path: Path, steps: int) -> None:
    """Tensors of 8, 16 and 64 bits at any depth, numbers, text, None: torch would cast tensors to
    the type of the weights, and make text of an iterator."""
    source, target = odd(5), odd(steps)
    torch.save(source.state_dict(), tmp_path / "state.pt")
    load(target, Reader().load_mapped(tmp_path / "state.pt"))
    assert repr(target.state_dict()) == repr(source.state_dict())
    for mine, theirs in zip(target.state, source.state, strict=True):
        mine.data.copy_(theirs)
    assert repr(trained(target, 3).state) == repr(trained(source, 3).state)


def test_no_value_of_another_type_is_converted_on_the_way() -> None:
    """A state of 8 bits would need four times its memory."""
    source, target = odd(5), odd(2)
    before = [id(each[name]) for each in target.state.values() for name in ("blocks", "momentum")]
    with Memory() as memory:
        load(target, source.state_dict())
    assert memory.peak_bytes == 0
    seen = [id(each[name]) for each in target.state.values() for name in ("blocks", "momentum")]
    assert seen == before


class Computing(OddOptimizer):
    """Computes of its state when it is loaded, and converts what an earlier version saved."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for each in self.state.values():
            each["total"] = float(each["momentum"].float().sum())
            each["count"] = torch.tensor(float(each["count"]))


def test_an_optimizer_computes_of_its_loaded_state() -> None:
    """In `__setstate__` and in hooks of its own, which see every value; what it converts stays."""
    source = odd(5)
    target = Computing([torch.nn.Parameter(torch.ones(size)) for size in (6, 9)])
    shapes: list[Any] = []
    target.register_load_state_dict_post_hook(
        lambda each: shapes.extend(state["momentum"].shape for state in each.state.values())
    )
    load(target, source.state_dict())
    assert shapes == [(6,), (9,)]
    for mine, theirs in zip(target.state.values(), source.state.values(), strict=True):
        assert mine["total"] == float(theirs["momentum"].float().sum()) != 0
        assert (mine["count"].item(), mine["momentum"].dtype) == (5.0, torch.bfloat16)
