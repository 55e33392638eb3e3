"""A process worker on this machine that saves its runs when it is stopped.

Prefect's own worker kills its runs when it is stopped, and leaves them behind when it is killed.
This one is started again when it is killed, and its runs continue meanwhile. All of them end when
the process that started the worker ends, SIGKILL included.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NoReturn

import psutil
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.states import AwaitingRetry, Crashed

from trial_core.common.text_format import plural
from trial_core.errors import TrialflowError
from trial_core.processes.machine.child import describe_exit, log_tail
from trial_core.processes.machine.memory_files import oom_kills
from trialflow.deployments import process_reaper
from trialflow.flows.lifecycle.crash_limit import FOUND, RESTART_CRASHED, may_begin_again
from trialflow.flows.lifecycle.detached_engine import (
    ENGINE,
    RESTARTED_ENGINE,
    SOON_SECONDS,
    SUPERVISOR_MODULE,
    RestartPauses,
)
from trialflow.flows.server.prefect_server import STOP_TIMEOUT_SECONDS, start_child
from trialflow.flows.server.prefect_settings import chosen_settings

# One of these is an argument of each process that holds a run: the supervisor and the engines.
HOLDERS = {SUPERVISOR_MODULE, ENGINE, RESTARTED_ENGINE, "flow-run"}
POLL_SECONDS = 0.1
# A run's grace period, 25 s by default, and time to start and end.
STOP_RUNS_TIMEOUT_SECONDS = 60.0
SETTINGS = {
    # Prefect's default of 10 s is half of the time that a crashed run may take to train again.
    "PREFECT_WORKER_QUERY_SECONDS": "2",
    # A worker ends after 12 requests without an answer, and its runs with it. With the default of 5
    # retries that is after a quarter of an hour, with 8 after an hour and a half.
    "PREFECT_CLIENT_MAX_RETRIES": "8",
}


class WorkerEnded(TrialflowError):
    """The worker has ended by itself too often to be started again."""


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
        command += ["--type", "process", *options]
        self._has_limit = has_limit(options)
        self._log_path = log_path
        self._start = partial(start_child, command, variables, log_path, answers=True)
        self._reaper = self._start()

    def __enter__(self) -> LocalWorker:
        return self

    def __exit__(self, *exception: object) -> None:
        """End the runs, which save, and the worker; kill what is left after their grace periods."""
        self.stop_runs(STOP_RUNS_TIMEOUT_SECONDS)
        if self._reaper.lives():
            os.kill(self._reaper.pid, signal.SIGTERM)
        self._reaper.wait(process_reaper.GRACE_SECONDS)
        self._reaper.end(STOP_TIMEOUT_SECONDS)

    def serve(self, on_end: Callable[[str], object]) -> NoReturn:
        """Start the worker again whenever it ends, until a signal raises an exception here.

        Args:
            on_end: called before each new start, with a sentence about the worker's end.

        Raises:
            WorkerEnded: within a minute of its start, it was killed five times in a row, or it has
                ended by itself, as it would again.
        """
        restarts = RestartPauses()
        while True:
            began, (is_killed, how) = time.monotonic(), self.wait_for_end()
            pause_seconds = restarts.pause_seconds(time.monotonic() - began)
            if pause_seconds is None or (restarts.soon and not is_killed):
                times = plural(restarts.soon, "time")
                raise WorkerEnded(
                    f"the worker has ended {times}, within {SOON_SECONDS:g} s of its start: "
                    f"it {how}"
                )
            on_end(f"the worker is started again, and its runs continue meanwhile: it {how}")
            time.sleep(pause_seconds)
            while self._has_limit and self._reaper.lives() and self._left_runs():
                time.sleep(POLL_SECONDS)  # a new worker would not count them
            if not (self._reaper.lives() and self._reaper.tell(b"\n")):
                self._reaper = self._start()

    def wait_for_end(self) -> tuple[bool, str]:
        """Wait until the worker has ended. Return whether it was killed, and how it ended."""
        kills = oom_kills()
        if answer := self._reaper.output.readline():
            code = int(answer)
        else:  # the reaper was killed: so are the worker and supervisors, whose engines save
            self._reaper.kill()
            code = self._reaper.exit_code or 0
        if code >= 0:
            log = log_tail(self._log_path) if self._log_path else "see its log"
            return False, f"{describe_exit(code)}; {log}"
        memory = " (meanwhile the kernel has killed a process for lack of memory)"
        return True, f"{describe_exit(code)}{memory if oom_kills() > kills else ''}"

    def stop_runs(self, timeout_seconds: float) -> None:
        """Have the runs save, go back into their queue and end. The worker takes no more runs."""
        deadline = time.monotonic() + timeout_seconds
        children = _children(self._reaper.pid) if self._reaper.lives() else []
        workers = [process for process in children if "worker" in _command(process)]
        for worker in workers:
            worker.suspend()  # it would take its own runs from the queue again
        runs = [run for worker in workers for run in _children(worker.pid)]
        runs += self._left_runs()
        for run in runs:
            with contextlib.suppress(psutil.NoSuchProcess):
                run.terminate()
        while any(map(_is_running, runs)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.terminate()  # before it resumes, so that it does nothing else
                worker.resume()

    def _left_runs(self) -> list[psutil.Process]:
        """Those of workers and supervisors that were killed."""
        children = _children(self._reaper.pid) if self._reaper.lives() else []
        return [process for process in children if HOLDERS & {*_command(process)}]


def has_limit(options: Iterable[str]) -> bool:
    """Return whether options of ``prefect worker start`` limit its runs."""
    return any(re.match(r"--limit(=|$)|-l", each) for each in options)


def requeue_lost_runs(client: SyncPrefectClient, pool: str) -> list[str]:
    """Schedule the runs again that have no process; return a sentence about each.

    Call it only while the work pool has no worker; its runs are on this machine.
    """
    is_begun = FlowRunFilter.model_validate({"state": {"type": {"any_": ["PENDING", "RUNNING"]}}})
    of_pool = WorkPoolFilter.model_validate({"name": {"any_": [pool]}})
    held = _held_runs()  # before the states are read: a run may end meanwhile
    begun = client.read_flow_runs(flow_run_filter=is_begun, work_pool_filter=of_pool)
    return [_requeue(client, run) for run in begun if str(run.id) not in held]


def _requeue(client: SyncPrefectClient, run: FlowRun) -> str:
    state: State[None]
    if run.state_type == StateType.PENDING:
        state = AwaitingRetry(message="its start was interrupted")
        then = "its start was interrupted: the worker starts it again in a few seconds"
    elif may_begin_again(client, run):
        state = AwaitingRetry(message=FOUND)
        then = (
            "it was Running and had no process any more: the worker continues it in a few seconds, "
            "from its last committed checkpoint"
        )
    else:
        state = Crashed(message="The run had no process any more")
        then = (
            "it was Running and had no process any more: it is Crashed now, and not started again, "
            f"because the automation '{RESTART_CRASHED}' is paused, it has crashed too often, or "
            "it is none of trialflow's"
        )
    client.set_flow_run_state(run.id, state, force=True)
    return f"{run.name}: {then}"


def _held_runs() -> set[str]:
    """The ids of the flow runs that have a process on this machine. Ranks do not count."""
    held = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if HOLDERS & {*process.cmdline()}:
                held.add(process.environ().get("PREFECT__FLOW_RUN_ID", ""))
    return held


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []


def _is_running(process: psutil.Process) -> bool:
    """Return whether a process runs. A suspended worker leaves its ended runs as zombies."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
