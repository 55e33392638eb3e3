"""A process worker on this machine whose runs save when it is stopped, and which goes when the
process that started it goes, SIGKILL included.

Prefect's own worker kills its runs when it is stopped, and leaves them behind when it is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import State, StateType
from prefect.states import AwaitingRetry

from trialflow.deployments import process_reaper
from trialflow.flows.server.local_server import STOP_LIMIT_SECONDS, end, start
from trialflow.flows.server.prefect_settings import chosen_settings

POLL_SECONDS = 0.1
# Prefect's own 10 s are half of what a crashed run may take to train again; and where somebody
# waits at the terminal for their run to start, they seem long.
SETTINGS = {"PREFECT_WORKER_QUERY_SECONDS": "2"}


class LocalWorker:
    """``prefect worker start``, for the length of a block.

    Args:
        pool: its work pool, of type process.
        log_path: where its log goes, and its runs' output (appended); None: where that of this
            process goes.
        options: more for ``prefect worker start``.
    """

    def __init__(
        self,
        pool: str,
        log_path: Path | None,
        options: tuple[str, ...] = (),
    ) -> None:
        command = [
            *(
                process_reaper.__file__,
                str(os.getpid()),
                sys.executable,
                "-m",
                "prefect",
                "--no-prompt",
            ),
            *("worker", "start", "--pool", pool, "--type", "process", *options),
        ]
        # The job template's `command` begins with `python`: this one.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        self._keeper = start(command, {**SETTINGS, **chosen_settings(), "PATH": path}, log_path)

    def __enter__(self) -> LocalWorker:
        return self

    def __exit__(self, *exception: object) -> None:
        """End the worker in good order, and with it whatever of its runs is left."""
        with contextlib.suppress(ProcessLookupError):
            self._keeper.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._keeper.wait(process_reaper.GRACE_SECONDS)
        end(self._keeper, STOP_LIMIT_SECONDS)

    @property
    def has_ended(self) -> bool:
        """Whether it has ended by itself."""
        return self._keeper.poll() is not None

    def stop_runs(self, limit_seconds: float) -> None:
        """Have its runs save and end, each back in its queue; wait for that. Then end the block."""
        deadline = time.monotonic() + limit_seconds
        below = _children(psutil.Process(self._keeper.pid))
        workers = [process for process in below if "worker" in _command(process)]
        # Those whose own keeper was killed save by themselves, below ours.
        saving = [process for process in below if "prefect.engine" in _command(process)]
        for worker in workers:
            # It would take its own runs out of the queue again.
            worker.suspend()
        runs = [run for worker in workers for run in _children(worker)]
        for run in runs:
            with contextlib.suppress(psutil.NoSuchProcess):
                run.terminate()
        while any(map(_is_alive, [*runs, *saving])) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.terminate()  # first, so that it does nothing else when it wakes
                worker.resume()


def requeue_interrupted_starts(client: SyncPrefectClient, pool: str) -> int:
    """Schedule runs of a work pool again whose start was interrupted, by the end of the worker that
    was at it; how many. Only for a pool that has no worker now.
    """
    interrupted = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PENDING]))
        ),
        work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[pool])),
    )
    for run in interrupted:
        again: State[None] = AwaitingRetry(message="its start was interrupted")
        client.set_flow_run_state(run.id, again, force=True)
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


def _is_alive(process: psutil.Process) -> bool:
    """Whether it runs. A worker that is suspended buries nobody."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
