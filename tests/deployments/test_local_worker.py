"""The worker of `trialflow worker` and `trialflow up`."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.prefect import isolated
from tests.support.waiting import until
from trial_core.processes.machine.child import Child
from trialflow.deployments import local_worker
from trialflow.deployments.local_worker import LocalWorker, WorkerEnded, has_limit
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

    def start(command: list[str], settings: Any, log_path: Path | None, answers: bool) -> None:
        variables.update(settings)

    monkeypatch.setattr(local_worker, "start_child", start)
    with environment({**isolated(tmp_path), **chosen}):
        LocalWorker("pool", tmp_path / "worker.log")
    assert variables[INTERVAL] == used
    # Prefect's worker ends after 12 requests, whose pauses double.
    assert 12 * sum(2**retry for retry in range(1, 1 + int(variables[RETRIES]))) > 3600


# Starts a run, as Prefect's worker does. The run's last line says what its worker did meanwhile.
WORKER = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1], "flow-run"])
"""
# Starts a run, and then is killed, or its parent.
KILLED_WORKER = """
import os, signal, subprocess, sys
run = subprocess.Popen([sys.executable, "-c", sys.argv[1], "flow-run"], stdout=subprocess.PIPE)
print("run", run.pid, run.stdout.readline().decode(), flush=True)
os.kill(os.VICTIM(), signal.SIGKILL)
signal.pause()
"""
RUN = """
import os, psutil, signal, sys
def end(*_):
    print(psutil.Process(os.getppid()).status(), file=sys.stderr, flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, end)
print("runs", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have another program run in place of Prefect's worker."""

    def use(program: str) -> None:
        def start(command: list[str], *arguments: Any, answers: bool) -> Child:
            reaper = [*command[: command.index("-m")], "-c", program, RUN, "worker"]
            return start_child(reaper, *arguments, answers=answers)

        monkeypatch.setattr(local_worker, "start_child", start)

    return use


def test_a_worker_whose_runs_are_stopped_takes_no_others(
    tmp_path: Path, fake: Callable[[str], None]
) -> None:
    """It is suspended until they have ended: they go back into the queue that it takes from."""
    log = tmp_path / "worker.log"
    fake(WORKER)
    with environment(isolated(tmp_path)), LocalWorker("pool", log) as worker:
        until(lambda: "runs" in log.read_text(), "the run", 60.0)
        worker.stop_runs(60.0)
        worker.wait_for_end()
    assert log.read_text().split() == ["runs", psutil.STATUS_STOPPED]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
@pytest.mark.parametrize("victim", ["getpid", "getppid"])
def test_a_killed_worker_is_started_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fake: Callable[[str], None],
    victim: str,
) -> None:
    """It is said what has killed it or its reaper, and whether memory was short. The runs of a
    killed worker live on meanwhile, and are stopped at the end."""
    log = tmp_path / "worker.log"
    fake(KILLED_WORKER.replace("VICTIM", victim))
    counts = iter([3, 4, 4, 4])
    monkeypatch.setattr(local_worker, "oom_kills", lambda: next(counts))
    told: list[str] = []
    runs: list[psutil.Process] = []

    def note(how: str) -> None:
        told.append(how)
        pids = re.findall(r"run (\d+)", log.read_text())
        runs[:] = [psutil.Process(int(pid)) for pid in pids]
        if len(told) == 2:
            raise KeyboardInterrupt

    with (
        environment(isolated(tmp_path)),
        LocalWorker("pool", log) as worker,
        pytest.raises(KeyboardInterrupt),
    ):
        worker.serve(note)
    assert ["SIGKILL" in how for how in told] == [True, True]
    assert ["lack of memory" in how for how in told] == [True, False]
    assert len(runs) == 2
    # A run's last line says that SIGTERM has reached it.
    assert log.read_text().count(psutil.STATUS_SLEEPING) == (2 if victim == "getpid" else 0)
    assert psutil.wait_procs(runs, 10.0)[1] == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
def test_a_worker_with_a_limit_waits_for_the_runs_that_it_would_not_count(
    tmp_path: Path, fake: Callable[[str], None]
) -> None:
    """Else more runs than it allows would share the machine, whose memory may have been short."""
    log = tmp_path / "worker.log"
    fake(KILLED_WORKER.replace("VICTIM", "getpid"))
    lived: list[bool] = []
    ended = threading.Event()

    def end_run() -> None:
        ended.wait(2)  # time for another worker to begin; none does
        run, *others = re.findall(r"run (\d+)", log.read_text())
        lived.append(psutil.pid_exists(int(run)) and not others)
        psutil.Process(int(run)).terminate()

    def note(how: str) -> None:
        if lived:
            raise KeyboardInterrupt
        threading.Thread(target=end_run).start()

    with (
        environment(isolated(tmp_path)),
        LocalWorker("pool", log, ("--limit", "1")) as worker,
        pytest.raises(KeyboardInterrupt),
    ):
        worker.serve(note)
    assert lived == [True]


@pytest.mark.parametrize("options", ["--limit 1", "--limit=1", "-l 1", "-l1", "--name a -l=1"])
def test_the_forms_of_a_limit(options: str) -> None:
    """All that Prefect's command takes count."""
    assert has_limit(options.split())
    assert not has_limit(["--name", "limit", "--work-queue", "l"])


def test_a_worker_that_cannot_start(tmp_path: Path, fake: Callable[[str], None]) -> None:
    """It is not started again. The error has its last words."""
    fake("raise SystemExit('no such option')")
    with (
        environment(isolated(tmp_path)),
        LocalWorker("pool", tmp_path / "worker.log") as worker,
        pytest.raises(WorkerEnded, match=r"exit code 1(.|\n)*no such option"),
    ):
        worker.serve(pytest.fail)
