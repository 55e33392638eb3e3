"""Runs that are tracked: a real MLflow server, and ranks of a warm fork server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import Browser, chromium
from tests.support.mlflow_server import MlflowServer, mlflow_server


@pytest.fixture(scope="session")
def shared_mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    """A server that tests of this process share; it starts when first needed."""
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as server:
        yield server


@pytest.fixture
def mlflow(shared_mlflow: MlflowServer) -> MlflowServer:
    """A server that runs: a test may have killed it."""
    shared_mlflow.start()
    return shared_mlflow


@pytest.fixture
def here(warm_home: Path, linked_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a test's runs, trackers and storage."""
    monkeypatch.setenv("TRACKIO_DIR", str(linked_folder / "trackio"))
    return warm_home


@pytest.fixture
def browser() -> Iterator[Browser]:
    """A tab that is wide enough for MLflow's page."""
    with chromium(1500, 1000) as tab:
        yield tab


@pytest.fixture
def own_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An importable folder whose package adds the tracker ``lines`` by an entry point."""
    folder = tmp_path / "packages"
    about = folder / "own_tracker-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own-tracker\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[trialflow.trackers]\nlines = own_lines_tracker:LinesTracker\n"
    )
    source = Path(__file__).parents[3] / "support" / "own_lines_tracker.py"
    (folder / "own_lines_tracker.py").write_text(source.read_text())
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    yield folder
    sys.modules.pop("own_lines_tracker", None)
