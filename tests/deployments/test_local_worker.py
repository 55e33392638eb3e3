"""The worker of `trialflow worker` and `trialflow up`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.prefect import isolated
from trialflow.deployments import local_worker
from trialflow.flows.server.prefect_settings import environment

INTERVAL = "PREFECT_WORKER_QUERY_SECONDS"


@pytest.mark.parametrize(("chosen", "used"), [({}, "2"), ({INTERVAL: "7.0"}, "7.0")])
def test_the_query_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: dict[str, str], used: str
) -> None:
    """The worker asks for runs every 2 s instead of Prefect's 10 s; the user's setting wins."""
    variables: dict[str, str] = {}

    def start(command: list[str], settings: Any, log_path: Path | None) -> None:
        variables.update(settings)

    monkeypatch.setattr(local_worker, "start_child", start)
    with environment({**isolated(tmp_path), **chosen}):
        local_worker.LocalWorker("pool", tmp_path / "worker.log")
    assert variables[INTERVAL] == used
