"""The tasks that are made of a run's stages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prefect.context import FlowRunContext

from tests.support.stages import all_stages
from trialflow.tasks.stages import SPECIAL, forgetting_results, task_of

SPECIAL_STAGES = {"checkpoint_upload", "train_workload", "run_script"}


def test_only_special_stages_are_not_the_declared_functions() -> None:
    """Under Prefect, uploads materialize assets, and long runs forget results."""
    declared = all_stages()
    special = {name for name, stage in declared.items() if task_of(stage).fn is not stage.work}
    assert special == SPECIAL_STAGES == {name.replace("-", "_") for name in SPECIAL}
    for name in ("train_workload", "run_script"):
        assert vars(task_of(declared[name]).fn)["__wrapped__"] is declared[name].work


def test_a_flow_forgets_earlier_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the stage runs; else the memory of a long run would grow."""
    context: Any = SimpleNamespace(run_results={1: "state"}, task_run_assets={2: "asset"})
    monkeypatch.setattr(FlowRunContext, "get", lambda: context)
    seen: list[int] = []
    work = forgetting_results(
        lambda: seen.append(len(context.run_results) + len(context.task_run_assets))
    )
    work()
    assert seen == [0]
