"""A real MLflow server on a free port of 127.0.0.1, which can be killed and started again."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from tests.support.processes import descendants, wait_until_gone
from tests.support.waiting import until

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient


class MlflowServer:
    """A server with its database and its artifacts in a folder."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def client(self) -> MlflowClient:
        """A client of the server."""
        from mlflow.tracking import MlflowClient  # takes seconds

        return MlflowClient(self.url)

    def start(self) -> None:
        """Start the server if it does not run, and wait until it answers."""
        if self._process is not None:
            return
        with (self._folder / "mlflow.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1",
                    "--port", str(self.port), "--workers", "1",
                    "--backend-store-uri", f"sqlite:///{self._folder}/mlflow.db",
                    "--artifacts-destination", str(self._folder / "artifacts"),
                ],
                cwd=self._folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}, start_new_session=True,
            )  # fmt: skip
        until(self._answers, "an answer of MLflow's server")

    def kill(self) -> None:
        """Kill it with its workers."""
        if self._process is not None:
            pids = [self._process.pid, *descendants(self._process.pid)]
            for pid in pids:
                os.kill(pid, 9)
            self._process.wait()
            wait_until_gone(pids, 10)
            self._process = None

    def points(self, trial: str, experiment: str) -> dict[str, list[tuple[int, float]]]:
        """The points of the trial's only run, by metric, in the order of time."""
        run = self.run(trial, experiment)
        found = {}
        for name in run.data.metrics:
            history = self.client.get_metric_history(run.info.run_id, name)
            found[name] = [(each.step, each.value) for each in history]
        return found

    def run(self, trial: str, experiment: str):  # type: ignore[no-untyped-def]
        """The trial's only run, in an experiment."""
        place = self.client.get_experiment_by_name(experiment).experiment_id
        (run,) = self.client.search_runs([place], f"tags.`trialflow.trial` = '{trial}'")
        return run

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).is_success
        except httpx.HTTPError:
            return False


@contextmanager
def mlflow_server(folder: Path) -> Iterator[MlflowServer]:
    """A server that runs within the block."""
    server = MlflowServer(folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()
