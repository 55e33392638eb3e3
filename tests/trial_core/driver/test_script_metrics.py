"""A script that does not report the searcher metric."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from trial_core.driver.loss_watch import LossWatch
from trial_core.driver.run import LaunchStatus
from trial_core.driver.stages.script import ScriptReports, run_script
from trial_core.messages import CheckpointWritten, MetricsReported


def ignore(*_: Any) -> None:
    """Of no interest here."""


def test_a_missing_searcher_metric_is_said_once() -> None:
    """Where people look, not in the log alone: no checkpoint is the best then."""
    events = [
        MetricsReported(kind="validation", steps_completed=step, metrics={"eval_loss": 1.0})
        for step in (1, 2)
    ]
    written = CheckpointWritten(uuid="u", steps_completed=2)
    told: list[str] = []
    run = SimpleNamespace(
        clock=SimpleNamespace(batches_trained=ignore),
        logger=SimpleNamespace(info=ignore),
        observer=SimpleNamespace(metrics_reported=ignore),
    )

    class Launch(SimpleNamespace):
        def stage(self, *_: str) -> Any:
            return nullcontext()

    launch: Any = Launch(run=run, status=LaunchStatus(), losses=LossWatch(False), warn=told.extend)
    script: Any = SimpleNamespace(next_event=iter([*events, written]).__next__)
    progress = ScriptReports("loss", smaller_is_better=True)
    assert run_script.work(launch, script, progress, 0) is written
    (warning,) = told
    assert warning.startswith("no checkpoint counts as the best: ")
    assert "eval_loss" in warning
