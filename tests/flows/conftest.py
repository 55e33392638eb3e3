"""A shared process worker, and a run that trains on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.prefect import PrefectServer, process_worker
from tests.support.prefect_worker import Scene
from tests.support.ways_to_stop import Worker, on_a_worker


@pytest.fixture(scope="session")
def shared_worker(prefect_server: PrefectServer) -> Iterator[Worker]:
    """One process worker for all scenes that do not kill it."""
    with process_worker(prefect_server, "shared") as pid:
        yield Worker("shared", pid)


@pytest.fixture
def scene(prefect_server: PrefectServer, shared_worker: Worker, tmp_path: Path) -> Iterator[Scene]:
    """A run that is training on a worker."""
    with on_a_worker(prefect_server, shared_worker, tmp_path) as scene:
        scene.until_trained()
        yield scene
