"""Stages of a run in a test: fakes, and all that are declared."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import trial_core.driver.stages
from trial_core.driver.stages.declared_stage import DeclaredStage, plain
from trial_core.processes.machine.background import in_background

Execute = Callable[[DeclaredStage[..., Any]], Callable[..., Any]]


def beside(work: Callable[..., Any]) -> Callable[..., Future[Any]]:
    """A fake of a stage that runs in parallel with training."""
    return lambda *given: in_background(lambda: work(*given), "a fake")


def faking(execute: Execute = plain, **fakes: Callable[..., Any]) -> Execute:
    """Execute these functions in place of the stages of their names, and others by `execute`."""
    return lambda stage: fakes.get(stage.name.replace("-", "_")) or execute(stage)


def all_stages() -> dict[str, DeclaredStage[..., Any]]:
    """The declared stages, by the names of their functions."""
    folder = trial_core.driver.stages
    found: dict[str, DeclaredStage[..., Any]] = {}
    for module in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
        for name, each in vars(importlib.import_module(module.name)).items():
            if isinstance(each, DeclaredStage):
                found[name] = each
    return found
