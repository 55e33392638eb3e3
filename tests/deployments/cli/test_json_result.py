"""`trialflow train --json`: the last line of stdout is a JSON object, whatever the end."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import write_experiment
from trial_core.errors import CheckpointDamaged, RankFailed, Stopped, TrialflowError
from trialflow.deployments.cli.json_result import JsonResult
from trialflow.deployments.cli.main import main
from trialflow.flows.train import TrialResult

FIELDS = {field.name for field in dataclasses.fields(TrialResult)}


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The one line of stdout."""
    (line,) = capsys.readouterr().out.splitlines()
    outcome: dict[str, Any] = json.loads(line)
    assert outcome.keys() == FIELDS | {"status", "error_type", "error"}
    return outcome


def test_a_run_that_returns(capsys: pytest.CaptureFixture[str]) -> None:
    """All that the flow returned; numbers that JSON does not have are null."""
    with JsonResult(is_printed=True) as outcome:
        outcome.completed(TrialResult("toy-1", 8, False, validation_metrics={"loss": float("nan")}))
    told = said(capsys)
    assert (told["status"], told["trial"], told["batches_trained"]) == ("completed", "toy-1", 8)
    assert told["validation_metrics"] == {"loss": None}


def test_a_run_that_was_stopped_by_its_budget(capsys: pytest.CaptureFixture[str]) -> None:
    """Completed for Prefect, stopped for a program that has to start it again."""
    with JsonResult(is_printed=True) as outcome:
        outcome.completed(TrialResult("toy-1", 8, True, stop_reason="time budget"))
    assert said(capsys)["status"] == "stopped"


@pytest.mark.parametrize(
    ("failure", "code", "status"),
    [
        (RankFailed(rank=1, host="h", during="x", signal_name="SIGKILL"), 1, "failed"),
        (CheckpointDamaged("x"), 1, "failed"),
        (TrialflowError("x"), 2, "refused"),
        (Stopped("in Prefect"), 1, "stopped"),
    ],
)
def test_a_run_that_fails(
    failure: TrialflowError, code: int, status: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What went wrong, by name and in a line; whether to change something first."""
    with JsonResult(is_printed=True) as outcome:
        outcome.failed(failure, code)
    told = said(capsys)
    assert (told["status"], told["error_type"]) == (status, type(failure).__name__)
    assert told["error"] == str(failure)


def test_a_bug(capsys: pytest.CaptureFixture[str]) -> None:
    """What nobody foresaw is an end too, and goes on to whoever reports bugs."""
    with pytest.raises(ZeroDivisionError), JsonResult(is_printed=True):
        _ = 1 / 0
    assert said(capsys)["status"] == "failed"


def test_a_mistaken_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is wrong with it is in the line as well as on stderr; the exit code is 2 as ever."""
    path = write_experiment(tmp_path, max_restarts=-1)
    assert main(["train", str(path), "--json"]) == 2
    told = said(capsys)
    assert (told["status"], told["error_type"]) == ("refused", "ConfigError")
    assert "max_restarts" in told["error"]


def test_without_json_nothing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """People are not shown JSON that they have not asked for."""
    path = write_experiment(tmp_path, max_restarts=-1)
    assert main(["train", str(path)]) == 2
    assert capsys.readouterr().out == ""
