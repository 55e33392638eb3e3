"""The lines that end a run's output."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.manifests import new_manifest
from trial_core.checkpoint.manifest import Manifest
from trial_core.driver.result import TrialResult
from trial_core.driver.summary import next_step, summary_lines

DONE = TrialResult("toy-1", 60, False, checkpoint_uuid="u", report_path="/r")


@pytest.mark.parametrize(
    ("result", "best", "is_script", "step"),
    [
        (DONE, new_manifest(), False, "trialflow export best:toy-1 --to model.safetensors --x"),
        (DONE, None, False, "trialflow export latest:toy-1 --to model.safetensors --x"),
        (DONE, None, True, "trialflow checkpoints download latest:toy-1 --to checkpoint --x"),
        (replace(DONE, stopped_early=True, stop_reason="SIGTERM"), new_manifest(), False, None),
        (replace(DONE, checkpoint_uuid=None), None, False, None),
    ],
)
def test_the_last_line_of_a_completed_run_is_a_next_step(
    result: TrialResult, best: Manifest | None, is_script: bool, step: str | None
) -> None:
    """With its best checkpoint, or its last if none is known; a stopped run has another one."""
    found = next_step(result, best, " --x", is_script)
    assert found == step
    last = f"  next    {step}" if step else "  report  /r"
    assert summary_lines("done", result, next_step=found)[-1] == last


def test_many_metrics_are_left_to_the_report() -> None:
    """A script's driver writes these lines into a pipe, which holds 64 KiB."""
    metrics = {f"accuracy of class {number}": 0.5 for number in range(1000)}
    lines = summary_lines("done", replace(DONE, validation_metrics=metrics))
    assert len("\n".join(lines)) < 10_000
    assert any("976 more metrics, in the report" in line for line in lines)
