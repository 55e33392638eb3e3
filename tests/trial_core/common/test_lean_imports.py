"""What importing DeepSpeed does not import."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.ranks import ROOT
from trial_core.common import lean_imports

SCRIPT = """
import importlib.util, sys
import trial_core
if sys.argv[1] == "before":
    import mlflow
import deepspeed
print("mlflow" in sys.modules, deepspeed.autotuning.autotuner.has_mlflow)
print(importlib.util.find_spec("mlflow") is not None)
"""


@pytest.mark.parametrize(
    ("when", "seen"),
    [("after", "False False"), pytest.param("before", "True True", marks=pytest.mark.long)],
)
def test_deepspeed_does_not_import_mlflow(when: str, seen: str) -> None:
    """Anything else may, before and afterwards."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, when], cwd=ROOT, text=True, capture_output=True, check=True
    )
    assert done.stdout.splitlines()[-2:] == [seen, "True"]


MUON = """
import sys
import trial_core
import deepspeed
from deepspeed.runtime.zero.muon import muon_optimizer
print("torch._inductor.compile_fx" in sys.modules)
"""


def test_muon_imports_no_inductor() -> None:
    """Every engine imports this optimizer, and few use it."""
    done = subprocess.run(
        [sys.executable, "-c", MUON], cwd=ROOT, text=True, capture_output=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"


def test_muon_is_compiled_with_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, by torch.compile as usual."""
    compiled = []

    def compile(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled.append(function.__name__)
        return function

    muon = importlib.import_module(lean_imports.MUON)
    monkeypatch.setattr(torch, "compile", compile)
    gradient = torch.eye(4)
    steps = [muon.zeropower_via_newtonschulz5(gradient, steps=5) for _ in range(2)]
    assert compiled == ["zeropower_via_newtonschulz5"]
    assert torch.equal(*steps)


def test_what_a_compiled_function_calls_is_compiled_with_it() -> None:
    """As by torch.compile: Muon's update, which is compiled, calls other such functions."""
    inner = lean_imports.compiled_on_first_call(torch.sin)
    outer = torch.compile(lambda x: inner(x) + 1, backend="eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of a cache that it would look into
        assert torch.equal(outer(torch.ones(2)), torch.ones(2).sin() + 1)
