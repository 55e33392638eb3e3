"""How errors are printed, and their exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trial_core.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    ConfigError,
    DeadlineExceeded,
    LaunchError,
    RankFailed,
    StorageError,
    TrialError,
    TrialflowError,
)
from trialflow.deployments.cli.console import exit_code, report, report_bug

TRACEBACK = """\
Traceback (most recent call last):
  File "/home/me/model/trial.py", line 12, in __init__
    self.engine = context.wrap_model_engine(None)
  File "/site-packages/trial_core/deepspeed/context.py", line 40, in wrap_model_engine
    raise TrialError("no engine")
"""


def rank_failed(**fields: Any) -> RankFailed:
    return RankFailed(
        **{"rank": 1, "host": "h", "during": "BuildTrial", "log_path": "/logs/rank-1.log", **fields}
    )


@pytest.mark.parametrize(
    ("failure", "before_training", "afterwards"),
    [
        (ConfigError("x"), 2, 2),
        (TrialError("x"), 2, 2),
        (StorageError("x"), 2, 1),
        (CheckpointNotFound("x"), 2, 1),
        (LaunchError("x"), 2, 1),
        (DeadlineExceeded("x"), 1, 1),
        (CheckpointDamaged("x"), 1, 1),
        (rank_failed(signal_name="SIGKILL"), 1, 1),
        (rank_failed(error_type="RuntimeError", error_message="x"), 1, 1),
        (rank_failed(error_type="TrialError", error_message="x", is_ours=True), 2, 2),
        (rank_failed(error_type="TrialError", error_message="x"), 1, 1),
    ],
)
def test_exit_codes(failure: TrialflowError, before_training: int, afterwards: int) -> None:
    """Exit code 2: the user must change something first; 1: a failure, also while training."""
    assert exit_code(failure) == before_training
    assert exit_code(failure, has_trained=True) == afterwards


def test_a_trial_error_names_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A rule that a trial breaks: the message, the line in the user's code and the log's path."""
    failure = rank_failed(
        error_type="TrialError", error_message="no engine", is_ours=True, rank_traceback=TRACEBACK
    )
    report(failure, code_folder=Path("/home/me/model"))
    assert capsys.readouterr().err.splitlines() == [
        "error: no engine",
        "raised at /home/me/model/trial.py, line 12, in __init__",
        "whole log of rank 1: /logs/rank-1.log",
    ]


@pytest.mark.parametrize("name", ["ZeroDivisionError", "ConfigError"])
def test_a_trial_that_raises_shows_its_traceback(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """An exception of the user's code is printed with its traceback, whatever its name."""
    failure = rank_failed(error_type=name, error_message="by zero", rank_traceback=TRACEBACK)
    report(failure)
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: rank 1 on h raised {name}: by zero")
    assert 'File "/home/me/model/trial.py", line 12' in printed


def test_a_killed_rank_shows_its_log(capsys: pytest.CaptureFixture[str]) -> None:
    """A killed rank has no traceback; the end of its log is printed without control characters."""
    report(rank_failed(signal_name="SIGKILL", log_tail="out of\x1b[31m memory"))
    printed = capsys.readouterr().err
    assert "was killed by SIGKILL" in printed
    assert "out of memory" in printed


def test_a_bug_report_has_no_values_of_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person gives it to others, and the command line may have credentials."""
    words = ["trialflow", "train", "x.yaml", "--set", "checkpoint_storage.options.secret=hunter22"]
    monkeypatch.setattr("sys.argv", [*words, "--storage", "ftp://me:hunter22@host/runs"])
    report_bug(KeyError("x"))
    file = Path(capsys.readouterr().err.split("details to report: ")[1].split()[0])
    text = file.read_text()
    file.unlink()
    assert text.startswith(
        "trialflow train x.yaml --set checkpoint_storage.options.secret=... --storage "
        "ftp://host/runs\n"
    )
    assert "hunter22" not in text
