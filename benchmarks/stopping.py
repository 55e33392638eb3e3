"""Measures how soon a cancelled run frees its accelerators, and a crashed run trains again.

A real server, work pool, automations and worker run the deployment's flow, as under `trialflow up`,
with a new database. Through the API, as the UI does it, a run is cancelled

- during training;
- while it loads its data, so that there is nothing to save.

With SIGKILL,

- a rank is killed: the ranks start again, build the model and restore the last checkpoint;
- the driver is killed: the server notices and schedules the run again.

The model's own start is measured in processes without trialflow, and subtracted.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.figures import conclude
from benchmarks.ranks import ENVIRONMENT, ROOT, experiment, rank_processes
from benchmarks.workload import temporary_homes
from trial_core.checkpoint.store import CheckpointStore
from trial_core.processes.machine.accelerators import count_accelerators

POOL = "benchmark"
ENDLESS = 10**6
TIMEOUT_SECONDS = 300.0
TARGETS = {
    "cancel_and_save_seconds": 25.0,
    "cancel_with_nothing_to_save_seconds": 3.0,
    "crash_to_training_besides_own_start_seconds": 20.0,
    "driver_crash_to_training_besides_own_start_seconds": 20.0,
}


def until(condition: Callable[[], Any], what: str) -> Any:
    """Poll `condition` 100 times per second until it is true. Return its value.

    Raises:
        TimeoutError: it did not become true within 5 minutes.
    """
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} was not seen within {TIMEOUT_SECONDS:g} s")
        time.sleep(0.01)
    return found


def answered(ask: Callable[[], httpx.Response]) -> dict[str, Any]:
    """Return the server's answer. Repeats the request while SQLite is locked."""

    def unless_busy() -> httpx.Response | None:
        response = ask()
        return None if response.status_code == httpx.codes.SERVICE_UNAVAILABLE else response

    answer: dict[str, Any] = until(unless_busy, "an answer of the server").raise_for_status().json()
    return answer


class Run:
    """A flow run of a worker below this process.

    Args:
        folder: for everything that it writes.
        waits: True if it loads data for ever and never trains.
        saves_every: batches between checkpoints; by default only at the end.
    """

    def __init__(
        self, api: httpx.Client, folder: Path, model: str, ranks: int,
        waits: bool = False, saves_every: int = ENDLESS,
    ) -> None:  # fmt: skip
        self._api = api
        name = uuid.uuid4().hex[:8]
        self._record = folder / f"{name}.txt"
        config = experiment(
            "TimestampTrial", ranks, f"file://{folder}/{name}",
            name=name,
            entrypoint="benchmarks.stopping_trial:TimestampTrial",
            hyperparameters={
                "model": model, "bare_batches": 1, "record": str(self._record), "waits": waits,
            },
            searcher={"name": "single", "metric": "seconds", "max_length": {"batches": ENDLESS}},
            scheduling_unit=saves_every, min_checkpoint_period={"batches": saves_every},
            max_restarts=1,
        )  # fmt: skip
        self.store = CheckpointStore(config.checkpoint_storage.url)
        flow = self._post("/flows/", {"name": "train"})
        deployment = self._post(
            "/deployments/",
            {
                "name": name, "flow_id": flow["id"], "entrypoint": "trialflow.flows.train.train",
                "work_pool_name": POOL, "pull_steps": [], "enforce_parameter_schema": False,
                "tags": ["trialflow"],
            },
        )  # fmt: skip
        parameters = {"config": config.model_dump(mode="json")}
        path = f"/deployments/{deployment['id']}/create_flow_run"
        self._id: str = self._post(path, {"parameters": parameters})["id"]

    def trained(self) -> list[float]:
        """Return when each batch ended, in seconds since the epoch."""
        if not self._record.exists():
            return []
        return [float(line) for line in self._record.read_text().splitlines()]

    def has_begun(self) -> bool:
        """Return whether the run trains, or waits if it is to."""
        return self._record.exists()

    def cancel(self) -> float:
        """Cancel the run. Return the seconds until its ranks are gone."""
        ranks, began = rank_processes(), time.monotonic()
        state = {"type": "CANCELLING", "name": "Cancelling"}
        self._post(f"/flow_runs/{self._id}/set_state", {"state": state})
        until(lambda: not any(_runs(rank) for rank in ranks), "an end of the ranks")
        taken = time.monotonic() - began
        until(lambda: self._state() == "Cancelled", "the state Cancelled")
        return taken

    def crash(self, kills_driver: bool) -> float:
        """Kill a rank, or the driver. Return the seconds until another batch is trained."""
        ranks = rank_processes()
        fork_server = ranks[-1].parent()
        driver = fork_server.parent() if kills_driver and fork_server else None
        (driver or ranks[-1]).kill()
        killed_at = time.time()
        # A batch that all ranks had finished may still be recorded.
        until(lambda: not any(_runs(rank) for rank in ranks), "an end of the ranks")
        before = len(self.trained())
        until(lambda: len(self.trained()) > before, "training again")
        return self.trained()[before] - killed_at

    def _state(self) -> str:
        name: str = answered(lambda: self._api.get(f"/flow_runs/{self._id}"))["state_name"]
        return name

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return answered(lambda: self._api.post(path, json=body))


def cancel_and_save(run: Run) -> float:
    """Return the seconds from Cancel to the end of the ranks, for a run that saves."""
    until(lambda: len(run.trained()) > 7, "training")
    taken = run.cancel()
    saved, trained = run.store.list()[-1].progress.batches_trained, len(run.trained())
    if saved != trained:
        raise RuntimeError(
            f"the run trained {trained} batches, but its checkpoint is of batch {saved}"
        )
    return taken


def cancel_with_nothing_to_save(run: Run) -> float:
    """Return the seconds from Cancel to the end of the ranks, for a run that has not trained."""
    until(run.has_begun, "data being loaded")
    return run.cancel()


def crash_to_training(run: Run, kills_driver: bool = False) -> float:
    """Return the seconds from SIGKILL of a rank, or of the driver, to new ranks' first batch."""
    until(run.store.list, "a checkpoint")
    taken = run.crash(kills_driver)
    run.cancel()
    return taken


def own_start(model: str, ranks: int) -> float:
    """Return the seconds until processes without trialflow have trained a batch of the model."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = {
        **os.environ, **ENVIRONMENT, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    if count_accelerators(environment) == 0:
        environment["DS_ACCELERATOR"] = "cpu"
    began = time.time()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.stopping_trial", model], cwd=ROOT, text=True,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    printed = [process.communicate(timeout=TIMEOUT_SECONDS)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(
            f"bare ranks ended with exit codes {[p.returncode for p in processes]}: {printed}"
        )
    return float(printed[0].splitlines()[-1]) - began


@contextmanager
def prefect(folder: Path) -> Iterator[httpx.Client]:
    """Run a server and a worker with their logs in `folder`. Yields a client of the API."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate

    from trialflow.deployments.automations import automations
    from trialflow.deployments.desired_state import job_template
    from trialflow.deployments.local_worker import LocalWorker
    from trialflow.flows.server.prefect_server import local_server

    template = job_template("process")
    with local_server(0, folder / "server.log", TIMEOUT_SECONDS) as server:
        with get_client(sync_client=True) as client:
            client.create_work_pool(
                WorkPoolCreate(name=POOL, type="process", base_job_template=template)
            )
            for each in automations([POOL]):
                client.create_automation(each)
        try:
            with LocalWorker(POOL, folder / "worker.log"):
                user, _, password = server.login.password.partition(":")
                login = (user, password)
                with httpx.Client(
                    base_url=server.api_url, auth=login, timeout=TIMEOUT_SECONDS
                ) as api:
                    yield api
        except (TimeoutError, RuntimeError):
            print((folder / "worker.log").read_text()[-4000:], file=sys.stderr)
            raise


def measure(folder: Path, model: str, ranks: int, rounds: int) -> dict[str, list[float]]:
    """Return all measurements in seconds, by name: one value per round."""
    from trialflow.flows.server.prefect_settings import prepare_prefect

    prepare_prefect()
    taken: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        taken.setdefault(name, []).append(seconds)
        print(f"{name.replace('_', ' ')}: {seconds:.2f}", flush=True)

    with prefect(folder) as api:
        for number in range(rounds):
            place = folder / str(number)
            place.mkdir()
            started = partial(Run, api, place, model, ranks)
            note("cancel_and_save_seconds", cancel_and_save(started()))
            idle = started(waits=True)
            note("cancel_with_nothing_to_save_seconds", cancel_with_nothing_to_save(idle))
            rank_crash = crash_to_training(started(saves_every=5))
            driver_crash = crash_to_training(started(saves_every=5), kills_driver=True)
            own = own_start(model, ranks)
            note("own_start_seconds", own)
            note("crash_to_training_seconds", rank_crash)
            note("crash_to_training_besides_own_start_seconds", rank_crash - own)
            note("driver_crash_to_training_seconds", driver_crash)
            note("driver_crash_to_training_besides_own_start_seconds", driver_crash - own)
    return taken


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks.stopping", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", default="medium")
    arguments = parser.parse_args()
    os.environ.pop("PREFECT_API_URL", None)  # it creates deployments and does not remove them
    with temporary_homes() as folder:
        taken = measure(folder, arguments.model, arguments.ranks, arguments.rounds)
    # The worst of all rounds: a cluster's grace period is a hard limit.
    conclude({name: max(values) for name, values in taken.items()}, TARGETS)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    main()
