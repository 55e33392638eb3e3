"""A process worker on this machine that saves its runs when it is stopped.

Prefect's own worker kills its runs when it is stopped, and leaves them behind when it is killed.
This one also ends when the process that started it ends, SIGKILL included.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import psutil
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter
from prefect.client.schemas.objects import State
from prefect.states import AwaitingRetry

from trialflow.deployments import process_reaper
from trialflow.flows.lifecycle.detached_engine import ENGINE, RESTARTED_ENGINE
from trialflow.flows.server.prefect_server import STOP_TIMEOUT_SECONDS, start_child
from trialflow.flows.server.prefect_settings import chosen_settings

ENGINES = {ENGINE, RESTARTED_ENGINE}
POLL_SECONDS = 0.1
SERVE_POLL_SECONDS = 1.0
# A run's grace period, 25 s by default, and time to start and end.
STOP_RUNS_TIMEOUT_SECONDS = 60.0
SETTINGS = {
    # Prefect's default of 10 s is half of the time that a crashed run may take to train again.
    "PREFECT_WORKER_QUERY_SECONDS": "2",
    # A worker ends after 12 requests without an answer, and its runs with it. With the default of 5
    # retries that is after a quarter of an hour, with 8 after an hour and a half.
    "PREFECT_CLIENT_MAX_RETRIES": "8",
}


class LocalWorker:
    """``prefect worker start`` below a process reaper, for the length of a block.

    Args:
        pool: its work pool, of type process.
        log_path: the file that its log and its runs' output are appended to, or None for this
            process's output.
        options: more options of ``prefect worker start``.
    """

    def __init__(self, pool: str, log_path: Path | None, options: tuple[str, ...] = ()) -> None:
        worker = ["-m", "prefect", "--no-prompt", "worker", "start", "--pool", pool]
        command = [process_reaper.__file__, str(os.getpid()), sys.executable, *worker]
        # The job template's `command` begins with `python`, which must be this one.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        variables = {**SETTINGS, **chosen_settings(), "PATH": path}
        self._reaper = start_child([*command, "--type", "process", *options], variables, log_path)

    def __enter__(self) -> LocalWorker:
        return self

    def __exit__(self, *exception: object) -> None:
        """Terminate the worker; after its grace period, kill it and its remaining runs."""
        if self._reaper.lives():
            os.kill(self._reaper.pid, signal.SIGTERM)
        self._reaper.wait(process_reaper.GRACE_SECONDS)
        self._reaper.end(STOP_TIMEOUT_SECONDS)

    @property
    def has_ended(self) -> bool:
        return not self._reaper.lives()

    def serve(self) -> None:
        """Return when the worker has ended. Stop its runs if a signal raises an exception here."""
        try:
            while not self.has_ended:
                time.sleep(SERVE_POLL_SECONDS)
        finally:
            if not self.has_ended:
                self.stop_runs(STOP_RUNS_TIMEOUT_SECONDS)

    def stop_runs(self, timeout_seconds: float) -> None:
        """Have the runs save, go back into their queue and end. The worker takes no more runs."""
        deadline = time.monotonic() + timeout_seconds
        children = _children(psutil.Process(self._reaper.pid))
        workers = [process for process in children if "worker" in _command(process)]
        # Engines whose supervisor was killed are the reaper's children, and save by themselves.
        engines = [process for process in children if ENGINES & {*_command(process)}]
        for worker in workers:
            worker.suspend()  # it would take its own runs from the queue again
        runs = [run for worker in workers for run in _children(worker)]
        for run in runs:
            with contextlib.suppress(psutil.NoSuchProcess):
                run.terminate()
        while any(map(_is_running, [*runs, *engines])) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.terminate()  # before it resumes, so that it does nothing else
                worker.resume()


def requeue_interrupted_starts(client: SyncPrefectClient, pool: str) -> int:
    """Schedule the runs again that a worker was starting when it ended; return how many.

    Call it only for a work pool that has no worker now.
    """
    interrupted = client.read_flow_runs(
        flow_run_filter=FlowRunFilter.model_validate({"state": {"type": {"any_": ["PENDING"]}}}),
        work_pool_filter=WorkPoolFilter.model_validate({"name": {"any_": [pool]}}),
    )
    for run in interrupted:
        state: State[None] = AwaitingRetry(message="its start was interrupted")
        client.set_flow_run_state(run.id, state, force=True)
    return len(interrupted)


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children()
    except psutil.NoSuchProcess:
        return []


def _is_running(process: psutil.Process) -> bool:
    """Return whether a process runs. A suspended worker leaves its ended runs as zombies."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
