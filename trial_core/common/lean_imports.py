"""Keeps DeepSpeed from importing what a rank does not use, which takes as long as PyTorch itself.

- It imports its autotuner, and that MLflow where it is installed, although no rank tunes.
- It imports its Muon optimizer with every engine, and that compiles three functions with
  ``torch.compile``, which imports inductor. Here it compiles them with their first calls.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import FrameType, ModuleType
from typing import Any

AUTOTUNER = "deepspeed.autotuning.autotuner"
MUON = "deepspeed.runtime.zero.muon.original_muon"


class _NoMlflowForTheAutotuner(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "mlflow" and _importer() == AUTOTUNER:
            raise ModuleNotFoundError("no rank tunes", name=fullname)
        return None


class _MuonWithoutInductor(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != MUON:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _MuonLoader(fullname, spec.loader.path)
        return spec


class _MuonLoader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        compiler: Any = importlib.import_module("deepspeed.runtime.compiler")
        decorator = getattr(compiler, "compile", None)
        if decorator is None:  # another release
            super().exec_module(module)
            return
        compiler.compile = lambda: compiled_on_first_call
        try:
            super().exec_module(module)
        finally:
            compiler.compile = decorator


def compiled_on_first_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """As ``torch.compile(function)``, but nothing is imported before the first call."""
    import torch

    @functools.cache
    def compiled() -> Callable[..., Any]:
        return torch.compile(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # its caller is compiled, and with it this one
            return function(*args, **kwargs)
        return compiled()(*args, **kwargs)

    return call


def _importer() -> str:
    """The name of the module that imports, seen from a finder."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("importlib."):
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__"))


def install() -> None:
    """Call once, before DeepSpeed is imported."""
    sys.meta_path[:0] = [_NoMlflowForTheAutotuner(), _MuonWithoutInductor()]
