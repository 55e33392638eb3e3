"""A report that cannot be written neither ends training nor hides why it ended."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tasks.report.reports import LOGGER
from trial_core.errors import RankFailed, Stopped
from trialflow.tasks.report import Report

LOST = RankFailed(rank=1, host="here", during="TrainBatches", signal_name="SIGKILL")
NewReport = Callable[[], Report]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the report has warned of."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == LOGGER and record.levelno == logging.WARNING
    ]


@pytest.mark.usefixtures("no_server")
def test_a_server_that_is_gone(new_report: NewReport, caplog: pytest.LogCaptureFixture) -> None:
    """Said once; the file is written all the same, and what ended training is what is raised."""
    report = new_report()
    report.write()
    with pytest.raises(RankFailed) as failure, report:
        raise LOST
    assert failure.value is LOST
    assert f"**failed: {LOST}**" in report.path.read_text(encoding="utf-8")
    (warning,) = warnings(caplog)
    assert "the report is not up to date" in warning
    assert "ConnectError" in warning


@pytest.mark.usefixtures("no_artifact")
def test_a_file_that_cannot_be_written(
    new_report: NewReport, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a full disk: what ended training is what is raised."""
    report = new_report()
    report.path.mkdir()
    with pytest.raises(RankFailed) as failure, report:
        raise LOST
    assert failure.value is LOST
    assert "IsADirectoryError" in caplog.text


@pytest.mark.usefixtures("no_artifact")
def test_a_storage_that_fails_at_the_end(
    new_report: NewReport, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be stored is still here, and a warning says so."""
    report = new_report()
    (tmp_path / "checkpoints").write_text("not a folder")
    with report:
        report.ended("completed")
    assert "**completed**" in report.path.read_text(encoding="utf-8")
    assert any("the report is not stored" in warning for warning in warnings(caplog))


@pytest.mark.usefixtures("no_artifact")
def test_a_run_that_was_stopped_has_not_failed(new_report: NewReport) -> None:
    """The report says who stopped it."""
    report = new_report()
    with pytest.raises(Stopped), report:
        raise Stopped("cancelled (in Prefect), before there was anything to save")
    assert "**stopped: cancelled (in Prefect), before" in report.path.read_text(encoding="utf-8")


@pytest.mark.usefixtures("no_artifact")
def test_the_file_is_never_half_written(new_report: NewReport) -> None:
    """A reader that has opened it keeps the last state, whole."""
    report = new_report()
    report.write()
    with report.path.open(encoding="utf-8") as reader:
        report.ended("completed")
        report.write()
        assert "**running**" in reader.read()
    assert "**completed**" in report.path.read_text(encoding="utf-8")
