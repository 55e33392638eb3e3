"""A shared process worker, a run that trains on it, and a run whose rank has hung."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.flow import WarmForkServer, breaking, one_slot, train
from tests.support.prefect import PrefectServer, process_worker
from tests.support.prefect_worker import Scene
from tests.support.ways_to_stop import Worker, on_a_worker


@pytest.fixture(scope="module")
def shared_worker(prefect_server: PrefectServer) -> Iterator[Worker]:
    """One process worker for all scenes of a module that do not kill it: it polls the server."""
    with process_worker(prefect_server, "shared") as pid:
        yield Worker("shared", pid)


@pytest.fixture
def scene(prefect_server: PrefectServer, shared_worker: Worker, tmp_path: Path) -> Iterator[Scene]:
    """A run that is training on a worker."""
    with on_a_worker(prefect_server, shared_worker, tmp_path) as scene:
        scene.until_trained()
        yield scene


@dataclass(frozen=True)
class HungRun:
    """A run whose rank has hung once, was replaced, and has trained to the end.

    Attributes:
        folder: of its files.
        result: what the flow has returned.
    """

    folder: Path
    config: Any
    result: Any


@pytest.fixture(scope="session")
def hung_run(
    prefect_server: PrefectServer, linked_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> HungRun:
    """8 batches on one slot, saved every 4; in batch 5 the rank hangs for 3 s."""
    folder = tmp_path_factory.mktemp("hung")
    linked_folder.unlink(missing_ok=True)
    linked_folder.symlink_to(folder)
    config = one_slot(
        folder, 8, max_restarts=1, stopping={"stall_timeout_seconds": 3},
        min_validation_period={"batches": 8}, hyperparameters=breaking(folder, "sleep", 5),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch, prefect_server.configured():
        patch.setenv("TRIALFLOW_HOME", str(linked_folder / "home"))
        patch.setattr("trial_core.driver.placement.ForkServer", WarmForkServer)
        return HungRun(folder, config, train(config))
