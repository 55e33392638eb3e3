"""Reports outside any flow run, as fixtures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import trialflow.tasks.report.live_report
from tests.support.prefect import free_port, isolated
from tests.support.slots import toy_config
from trial_core.run.observer import Observer
from trial_core.run.stop_requests import StopHandler
from trialflow.flows.server.prefect_settings import environment
from trialflow.tasks.report import Report
from trialflow.tasks.report.artifact import ReportArtifact

LOGGER = "report-of-a-test"


@pytest.fixture
def new_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Report]:
    """Creates reports of one trial, as its successive runs do."""
    monkeypatch.setattr(
        trialflow.tasks.report.live_report, "get_run_logger", lambda: logging.getLogger(LOGGER)
    )

    def new(run_dir: Path = tmp_path / "run", stopping: StopHandler | None = None) -> Report:
        run_dir.mkdir(exist_ok=True)
        config = toy_config(tmp_path)
        return Report(config, "toy-0000beef", run_dir, Observer(), stopping=stopping)

    return new


@pytest.fixture
def no_artifact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports write no Prefect artifacts."""
    monkeypatch.setattr(ReportArtifact, "write", lambda self, text: None)


@pytest.fixture
def no_server(tmp_path: Path) -> Iterator[None]:
    """The configured Prefect server does not answer."""
    nowhere = f"http://127.0.0.1:{free_port()}/api"
    with environment({**isolated(tmp_path / "prefect"), "PREFECT_API_URL": nowhere}):
        yield
