"""`trialflow train --json`: the last line of stdout is a JSON object, however the run ended."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import write_experiment
from tests.support.json_types import PRINTED_BY_ALL
from trial_core.errors import CheckpointDamaged, RankFailed, Stopped, TrialflowError
from trialflow.deployments.cli.json_result import JsonResult
from trialflow.deployments.cli.main import main
from trialflow.flows.train import TrialResult

FIELDS = {field.name for field in dataclasses.fields(TrialResult)} - {"config"}


def printed_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The only line of stdout, parsed."""
    (text,) = capsys.readouterr().out.splitlines()
    outcome: dict[str, Any] = json.loads(text)
    assert outcome.keys() == FIELDS | PRINTED_BY_ALL.keys() | {"status", "error_type", "error"}
    return outcome


def test_a_completed_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The line holds the flow's result; NaN is null."""
    with JsonResult(is_printed=True) as outcome:
        outcome.completed(TrialResult("toy-1", 8, False, validation_metrics={"loss": float("nan")}))
    line = printed_line(capsys)
    assert (line["status"], line["trial"], line["batches_trained"]) == ("completed", "toy-1", 8)
    assert line["validation_metrics"] == {"loss": None}


def test_a_run_stopped_by_its_time_budget(capsys: pytest.CaptureFixture[str]) -> None:
    """The status is stopped, so that a program starts the run again."""
    with JsonResult(is_printed=True) as outcome:
        outcome.completed(TrialResult("toy-1", 8, True, stop_reason="time budget"))
    assert printed_line(capsys)["status"] == "stopped"


@pytest.mark.parametrize(
    ("failure", "code", "status"),
    [
        (RankFailed(rank=1, host="h", during="x", signal_name="SIGKILL"), 1, "failed"),
        (CheckpointDamaged("x"), 1, "failed"),
        (TrialflowError("x"), 2, "refused"),
        (Stopped("in Prefect"), 1, "stopped"),
    ],
)
def test_a_failed_run(
    failure: TrialflowError, code: int, status: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names the error; the status tells failed from refused and stopped."""
    with JsonResult(is_printed=True) as outcome:
        outcome.failed(failure, code)
    line = printed_line(capsys)
    assert (line["status"], line["error_type"]) == (status, type(failure).__name__)
    assert line["error"] == str(failure)


def test_a_bug(capsys: pytest.CaptureFixture[str]) -> None:
    """An unexpected exception is a failed run, and is raised again."""
    with pytest.raises(ZeroDivisionError), JsonResult(is_printed=True):
        _ = 1 / 0
    assert printed_line(capsys)["status"] == "failed"


def test_a_refused_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake in the experiment is in the line; the exit code is 2."""
    path = write_experiment(tmp_path, max_restarts=-1)
    assert main(["train", str(path), "--json"]) == 2
    line = printed_line(capsys)
    assert (line["status"], line["error_type"]) == ("refused", "ConfigError")
    assert "max_restarts" in line["error"]


@pytest.mark.parametrize("options", ["--trial toy-1", "--follow --quiet", "--test --resume"])
def test_options_that_do_not_go_together(
    options: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line says so, too."""
    path = write_experiment(tmp_path)
    assert main(["train", str(path), "--json", *options.split()]) == 2
    line = printed_line(capsys)
    assert (line["status"], line["error_type"]) == ("refused", "ConfigError")
