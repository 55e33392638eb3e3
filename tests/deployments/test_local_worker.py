"""The worker of `trialflow worker` and `trialflow up`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.prefect import isolated
from tests.support.waiting import until
from trialflow.deployments import local_worker
from trialflow.flows.server.prefect_server import start_child
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


# Starts a run, as Prefect's worker does. The run's last line says what its worker did meanwhile.
WORKER = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1]])
"""
RUN = """
import os, psutil, signal, sys
def end(*_):
    print(psutil.Process(os.getppid()).status(), flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, end)
print("runs", flush=True)
while True:
    signal.pause()
"""


def test_a_worker_whose_runs_are_stopped_takes_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is suspended until they have ended: they go back into the queue that it takes from."""
    log = tmp_path / "worker.log"

    def start(command: list[str], settings: Any, log_path: Path | None) -> Any:
        reaper = [*command[: command.index("-m")], "-c", WORKER, RUN, "worker"]
        return start_child(reaper, settings, log_path)

    monkeypatch.setattr(local_worker, "start_child", start)
    with environment(isolated(tmp_path)), local_worker.LocalWorker("pool", log) as worker:
        until(lambda: "runs" in log.read_text(), "the run", 60.0)
        worker.stop_runs(60.0)
        until(lambda: worker.has_ended, "the worker's end", 60.0)
    assert log.read_text().split() == ["runs", psutil.STATUS_STOPPED]
