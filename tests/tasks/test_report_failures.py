"""A report that cannot be written neither ends training nor hides why it ended."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import tasks.report
from flows.environment import environment
from tasks.report import Report
from tests.support.prefect import free_port, isolated
from tests.support.slots import toy_config
from trial_core.errors import RankFailed
from trial_core.observer import Observer

pytestmark = pytest.mark.filterwarnings("ignore:Artifact creation outside:FutureWarning")

LOST = RankFailed(rank=1, host="here", during="TrainBatches", signal_name="SIGKILL")


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    """A report outside any flow run, whose Prefect server does not exist."""
    logger = logging.getLogger("report-of-a-test")
    monkeypatch.setattr(tasks.report, "get_run_logger", lambda: logger)
    (tmp_path / "run").mkdir()
    return Report(toy_config(tmp_path), "toy-0000beef", tmp_path / "run", Observer())


@pytest.fixture(autouse=True)
def _no_server(tmp_path: Path) -> Iterator[None]:
    nowhere = f"http://127.0.0.1:{free_port()}/api"
    with environment({**isolated(tmp_path / "prefect"), "PREFECT_API_URL": nowhere}):
        yield


def test_a_server_that_is_gone(report: Report, caplog: pytest.LogCaptureFixture) -> None:
    """Said once; the file is written all the same, and what ended training is what is raised."""
    report.update(force=True)
    with pytest.raises(RankFailed) as failure, report:
        raise LOST
    assert failure.value is LOST
    assert f"**failed: {LOST}**" in report.path.read_text(encoding="utf-8")
    (warning,) = [record for record in caplog.records if record.name == "report-of-a-test"]
    assert "the report is not up to date" in warning.message
    assert "ConnectError" in warning.message


def test_a_file_that_cannot_be_written(report: Report, caplog: pytest.LogCaptureFixture) -> None:
    """As on a full disk: what ended training is what is raised."""
    report.path.mkdir()
    with pytest.raises(RankFailed) as failure, report:
        raise LOST
    assert failure.value is LOST
    assert "IsADirectoryError" in caplog.text


def test_the_file_is_never_half_written(report: Report) -> None:
    """A reader that has opened it keeps the last state, whole."""
    report.update(force=True)
    with report.path.open(encoding="utf-8") as reader:
        report.ended("completed")
        report.update(force=True)
        assert "**running**" in reader.read()
    assert "**completed**" in report.path.read_text(encoding="utf-8")
