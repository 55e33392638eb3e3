"""Objects with tensors on devices, as other ranks read them."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.support.devices import on_another_device
from trial_core.rank.collectives.exchange import pickled


@dataclass
class Named:
    """An object of a class of the user's."""

    name: str
    value: torch.Tensor


class Marked(torch.Tensor):
    """A class of tensors, with an attribute that is a tensor, too."""

    mark: torch.Tensor


def marked() -> Marked:
    value = torch.arange(3.0).as_subclass(Marked)
    value.mark = torch.tensor(7)
    return value


def same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and torch.equal(one, other)


@pytest.mark.usefixtures("tensors_elsewhere")
def test_tensors_arrive_on_the_cpu() -> None:
    """Of every kind, in objects of every class. A plain pickle loads them onto their device."""
    tensor, layer = torch.randn(4, 3), torch.nn.Linear(2, 2)
    with pytest.raises(AssertionError, match="was loaded onto accelerator:1"):
        pickle.loads(pickle.dumps(tensor))
    stuff = {
        "named": [Named("a", tensor)], "view": tensor.t()[1:], "layer": layer, "marked": marked(),
    }  # fmt: skip
    found = pickle.loads(pickled(stuff))
    assert same(found["named"][0].value, tensor)
    assert same(found["view"], tensor.t()[1:])
    assert same(found["layer"].weight, layer.weight)
    assert found["layer"].weight.requires_grad
    assert same(found["marked"], marked())
    assert same(found["marked"].mark, torch.tensor(7))


@pytest.fixture
def tensors_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    on_another_device(monkeypatch)


def test_other_objects_are_pickled_as_usual() -> None:
    """Byte for byte, so that small ones fit into the first message of an exchange."""
    stuff = {"text": "a" * 100, "numbers": [1, 2.5, None], "shape": torch.Size([2])}
    assert pickled(stuff) == pickle.dumps(stuff)
