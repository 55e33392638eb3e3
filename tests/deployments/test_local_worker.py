"""The worker that `trialflow worker` and `trialflow up` start."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.support.prefect import isolated
from trialflow.deployments.local_worker import LocalWorker
from trialflow.flows.server.prefect_settings import environment

EVERY = "PREFECT_WORKER_QUERY_SECONDS"


@pytest.mark.parametrize(("chosen", "used"), [({}, "2"), ({EVERY: "7.0"}, "7.0")])
def test_it_asks_often_for_runs(tmp_path: Path, chosen: dict[str, str], used: str) -> None:
    """A run that is scheduled again does not wait 10 s for it, as by default; unless a user has
    chosen so."""
    with (
        environment({**isolated(tmp_path), **chosen}),
        LocalWorker("pool", tmp_path / "worker.log") as worker,
    ):
        assert psutil.Process(worker._keeper.pid).environ()[EVERY] == used
