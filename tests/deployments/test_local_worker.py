"""The worker of `trialflow worker` and `trialflow up`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.prefect import isolated
from trialflow.deployments import local_worker
from trialflow.flows.server.prefect_settings import environment

INTERVAL = "PREFECT_WORKER_QUERY_SECONDS"


RETRIES = "PREFECT_CLIENT_MAX_RETRIES"


@pytest.mark.parametrize(("chosen", "used"), [({}, "2"), ({INTERVAL: "7.0"}, "7.0")])
def test_the_settings_of_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: dict[str, str], used: str
) -> None:
    """The worker asks for runs every 2 s instead of Prefect's 10 s; the user's setting wins. It
    survives a server that is away for an hour."""
    variables: dict[str, str] = {}

    def start(command: list[str], settings: Any, log_path: Path | None) -> None:
        variables.update(settings)

    monkeypatch.setattr(local_worker, "start_child", start)
    with environment({**isolated(tmp_path), **chosen}):
        local_worker.LocalWorker("pool", tmp_path / "worker.log")
    assert variables[INTERVAL] == used
    # Prefect's worker ends after 12 requests, whose pauses double.
    assert 12 * sum(2**retry for retry in range(1, 1 + int(variables[RETRIES]))) > 3600
