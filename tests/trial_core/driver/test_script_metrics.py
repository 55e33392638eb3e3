"""What the driver makes of a script's reports."""

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


class Launch(SimpleNamespace):
    """A launch of two ranks."""

    def stage(self, *_: str) -> Any:
        return nullcontext()


def warnings_of(*events: MetricsReported) -> tuple[list[str], list[Any]]:
    """Have a script report and then store; the warnings, and what observers get."""
    written = CheckpointWritten(uuid="u", steps_completed=2)
    told: list[str] = []
    observed: list[Any] = []
    run = SimpleNamespace(
        clock=SimpleNamespace(batches_trained=ignore),
        logger=SimpleNamespace(info=ignore),
        observer=SimpleNamespace(metrics_reported=lambda *it: observed.append(it)),
        pause_at=None,
    )
    launch: Any = Launch(
        run=run, status=LaunchStatus(), losses=LossWatch(False), warn=told.extend, world_size=2
    )
    script: Any = SimpleNamespace(next_event=iter([*events, written]).__next__)
    progress = ScriptReports("loss", smaller_is_better=True)
    assert run_script.work(launch, script, progress, 0) is written
    return told, observed


def test_a_missing_searcher_metric_is_said_once() -> None:
    """Where people look, not in the log alone: no checkpoint is the best then."""
    (warning,), _ = warnings_of(*(
        MetricsReported(kind="validation", steps_completed=step, metrics={"eval_loss": 1.0})
        for step in (1, 2)
    ))  # fmt: skip
    assert warning.startswith("no checkpoint counts as the best: ")
    assert "eval_loss" in warning


def test_ranks_that_report_the_same_are_observed_once() -> None:
    """People are told once, since it costs time."""
    (warning,), observed = warnings_of(*(
        MetricsReported(kind="training", steps_completed=step, metrics={"loss": step}, rank=rank)
        for step in (1, 2)
        for rank in (0, 1)
    ))  # fmt: skip
    assert warning.startswith("several ranks report the same metrics (training metrics at 1)")
    assert observed == [("training", step, {"loss": step}) for step in (1, 2)]
