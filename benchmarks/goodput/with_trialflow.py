"""trialflow as `trialflow up` sets it up: a Prefect server, its automations and a worker.

They run all the time, so their start does not count. A run is one of a deployment of the flow
`train`, with the trial `trialflow_trial`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.goodput.workload import Job
from benchmarks.ranks import experiment
from benchmarks.stopping import POOL, answered, prefect
from tests.support.s3 import S3Server
from trial_core.config import ExperimentConfig
from trial_core.processes.machine.run_dirs import trial_id

FINAL = ("Failed", "Cancelled", "Completed")


class Trialflow:
    """A run of a worker, through the API, as the UI does it."""

    def __init__(self, api: httpx.Client, job: Job, server: S3Server) -> None:
        self._api, self._job, self._server = api, job, server
        self._run = ""  # its id
        self._trial: str | None = None

    def start(self, ranks: int) -> None:
        flow = self._post("/flows/", {"name": "train"})
        deployment = self._post(
            "/deployments/",
            {
                "name": uuid.uuid4().hex[:8], "flow_id": flow["id"], "tags": ["trialflow"],
                "entrypoint": "trialflow.flows.train.train", "work_pool_name": POOL,
                "pull_steps": [], "enforce_parameter_schema": False,
            },
        )  # fmt: skip
        config = self._config(ranks)
        parameters = {"config": config.model_dump(mode="json"), "trial": self._trial}
        path = f"/deployments/{deployment['id']}/create_flow_run"
        self._run = self._post(path, {"parameters": parameters})["id"]
        self._trial = self._trial or trial_id(config.name, self._run)

    def stop(self) -> None:
        self._post(
            f"/flow_runs/{self._run}/set_state",
            {"state": {"type": "CANCELLING", "name": "Cancelling"}},
        )

    def driver(self, rank: psutil.Process) -> psutil.Process | None:
        fork_server = rank.parent() if rank.is_running() else None
        return fork_server.parent() if fork_server else None

    def has_ended(self) -> bool:
        return self._state() in FINAL

    def _state(self) -> str:
        name: str = answered(lambda: self._api.get(f"/flow_runs/{self._run}"))["state_name"]
        return name

    def _config(self, ranks: int) -> ExperimentConfig:
        job = self._job
        return experiment(
            "trialflow_trial:GoodputTrial", ranks,
            {"url": job.bucket, "options": self._server.options},
            code=str(Path(__file__).parent),
            searcher={"name": "single", "metric": "loss", "max_length": {"batches": job.batches}},
            scheduling_unit=job.save_every, min_checkpoint_period={"batches": job.save_every},
            checkpoint_policy="none", max_restarts=job.restarts,
            checkpointing={"when_busy": "postpone"},
            stopping={"stall_timeout_seconds": job.stall_seconds},
            environment={
                "environment_variables": {
                    **job.environment, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
                }
            },
        )  # fmt: skip

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return answered(lambda: self._api.post(path, json=body))


@contextmanager
def service(folder: Path) -> Iterator[httpx.Client]:
    """Run server, automations and worker during the block. Yields a client of the API."""
    from trialflow.flows.server.prefect_settings import prepare_prefect

    prepare_prefect()
    with prefect(folder) as api:
        yield api
