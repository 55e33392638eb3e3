"""A compiled module has the names of the module itself."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.tensors import differing
from trial_core.checkpoint.weights.model_files import read_facts, write_facts
from trial_core.rank.state_files.compiled_names import name_as_uncompiled


class Counting(nn.Module):
    """Has a state of its own, besides its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.weight = nn.Parameter(torch.ones(3))
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.norm(inputs * self.weight)
        return outputs

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state


pytestmark = pytest.mark.xdist_group("torch.compile")


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def test_names_states_and_modules_are_those_of_the_module() -> None:
    """Also where it is compiled within a compiled one; it loads a plain state, and is copied."""
    plain, within = (nn.ModuleDict({"a": Counting(), "b": nn.Linear(3, 3)}) for _ in range(2))
    plain["a"].count = 7
    within["a"] = compiled(within["a"])
    model = compiled(within)
    name_as_uncompiled(model)
    name_as_uncompiled(model)
    for names in ("named_parameters", "named_buffers", "named_modules"):
        expected = [name for name, _ in getattr(plain, names)()]
        assert list(dict.fromkeys(name for name, _ in getattr(model, names)())) == expected
    result = model.load_state_dict(plain.state_dict())
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert model.a.count == 7
    state = model.state_dict()
    assert state.pop("a._extra_state") == plain.state_dict()["a._extra_state"]
    without = {k: v for k, v in plain.state_dict().items() if k in state}
    assert differing(without, state) == []
    classes = [type(each).__name__ for each in model.modules()]
    assert [each for each in classes if each != "OptimizedModule"] == [
        type(each).__name__ for each in plain.modules()
    ]
    again = copy.deepcopy(model)
    name_as_uncompiled(again)
    assert again.state_dict().keys() == plain.state_dict().keys()
    inputs = torch.randn(4, 3)
    assert torch.equal(again.a(inputs), plain["a"](inputs))
    assert model.a.to(torch.float64).weight is model.a._orig_mod.weight


def test_a_compiled_model_of_hugging_face_is_found(tmp_path: Path) -> None:
    """Not one of its parts, which are models of transformers, too."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, **sizes))
    facts = []
    for name, each in (("plain", model), ("compiled", compiled(model))):
        name_as_uncompiled(each)
        write_facts(each, tmp_path / name, {})
        facts.append(read_facts(tmp_path / name))
    assert facts[0] == facts[1]
    assert facts[0].hf is not None
