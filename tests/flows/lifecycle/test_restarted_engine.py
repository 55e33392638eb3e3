"""A run whose engine is killed under its supervisor: a real server, and a flow without ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.states import Completed, Pending, Running

from tests.flows.lifecycle.conftest import whole_state_of
from tests.support.prefect import ROOT, PrefectServer
from tests.support.prefect_worker import kill
from tests.support.waiting import WAIT_SECONDS, ask
from trialflow.deployments.automations import automations
from trialflow.flows.lifecycle import crash_limit, detached_engine, restarted_engine
from trialflow.flows.lifecycle.crash_limit import RESTART_CRASHED, TAG
from trialflow.flows.train import train

pytestmark = pytest.mark.server

SUPERVISOR = "trialflow.flows.lifecycle.detached_engine"
FLOW = "tests/support/scripts/killed_flow.py:killed"


@contextmanager
def restarting(server: PrefectServer, **changes: Any) -> Iterator[None]:
    """The server has the automation that restarts crashed runs, with these changes."""
    with server.configured(), get_client(sync_client=True) as client:
        (restart,) = (each for each in automations([]) if each.name == RESTART_CRASHED)
        created = client.create_automation(restart.model_copy(update=changes))
        try:
            yield
        finally:
            client.delete_automation(created)


def test_an_engine_knows_whether_its_supervisor_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one whose worker was stopped saves and ends. Most engines have none."""
    for supervisor, is_lost in ((None, False), (os.getppid(), False), (os.getpid(), True)):
        monkeypatch.setattr(detached_engine, "_supervisor", supervisor and str(supervisor))
        assert detached_engine.has_lost_supervisor() == is_lost


class Run:
    """A run of the flow that is killed, which a worker has taken from its queue."""

    def __init__(self, server: PrefectServer, folder: Path, times: int, **fields: Any) -> None:
        self._server, self._record = server, folder / "attempts"
        flow = ask(server, "flows/", {"name": "killed"})
        folder_step = {"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}
        self._deployment = ask(server, "deployments/", {
            "name": folder.name, "flow_id": flow["id"], "entrypoint": FLOW,
            "pull_steps": [folder_step], "tags": [TAG], "concurrency_limit": 1, **fields,
        })["id"]  # fmt: skip
        parameters = {"record": str(self._record), "times": times}
        path = f"deployments/{self._deployment}/create_flow_run"
        self.id = ask(server, path, {"parameters": parameters})["id"]
        with server.configured(), get_client(sync_client=True) as client:
            client.set_flow_run_state(UUID(self.id), Pending())

    def attempts(self) -> list[int]:
        """The process of each attempt."""
        return [int(line) for line in self._record.read_text().splitlines()]

    def states(self) -> list[str]:
        """The names of all the states that it has had."""
        return [state["name"] for state in self._states()]

    def states_of_parts(self) -> list[tuple[str, str]]:
        """The states of each subflow and of its task."""
        subflows = {"flow_runs": {"parent_flow_run_id": {"any_": [self.id]}}}
        found = ask(self._server, "flow_runs/filter", subflows)
        for each in found:
            of_it = {"flow_runs": {"id": {"any_": [each["id"]]}}}
            (each["task"],) = ask(self._server, "task_runs/filter", of_it)
        return [(each["state_name"], each["task"]["state_name"]) for each in found]

    def leases(self) -> set[str | None]:
        """Those of its place in its deployment's concurrency limit, in the states that need one."""
        needing = (each for each in self._states() if each["name"] in ("Pending", "Running"))
        return {each["state_details"]["deployment_concurrency_lease_id"] for each in needing}

    def _states(self) -> list[dict[str, Any]]:
        states = ask(self._server, f"flow_run_states/?flow_run_id={self.id}")
        return sorted(states, key=lambda state: str(state["timestamp"]))

    def places_taken(self) -> int:
        """Places in its deployment's concurrency limit."""
        limit = ask(self._server, f"deployments/{self._deployment}")["global_concurrency_limit"]
        return int(limit["active_slots"])

    def log(self) -> str:
        lines = ask(self._server, "logs/filter", {"logs": {"flow_run_id": {"any_": [self.id]}}})
        return "\n".join(line["message"] for line in lines)

    def supervised(self) -> int:
        """Run it as a worker does with our command; the command's exit code."""
        return subprocess.run(
            [sys.executable, "-m", SUPERVISOR], cwd=ROOT,
            env={**os.environ, **self._server.environment, "PREFECT__FLOW_RUN_ID": self.id},
            check=False,
        ).returncode  # fmt: skip


def test_a_killed_run_begins_again(prefect_server: PrefectServer, tmp_path: Path) -> None:
    """At once, as the same run, in another process, with its place in the deployment's limit. Its
    log says why. No crash is reported, which would schedule it once more. The subflow and the task
    that were killed have crashed in the timeline."""
    with restarting(prefect_server):
        run = Run(prefect_server, tmp_path, times=1)
        assert run.supervised() == 0
        assert sorted(run.states_of_parts()) == [("Completed", "Completed"), ("Crashed", "Crashed")]
    assert len(set(run.attempts())) == 2
    again = ["Pending", "Running"]
    assert run.states() == ["Scheduled", *again, *again, "Completed"]
    (lease,) = run.leases()
    assert lease is not None
    assert run.places_taken() == 0
    assert run.log().count("the run's process was ended by SIGKILL") == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        pytest.param({"enabled": False}, {}, id="paused"),
        pytest.param({"name": "another"}, {}, id="missing", marks=pytest.mark.long),
        pytest.param({}, {"tags": []}, id="untagged", marks=pytest.mark.long),
    ],
)
def test_a_run_that_is_not_restarted(
    changes: dict[str, Any], fields: dict[str, Any],
    prefect_server: PrefectServer, tmp_path: Path,
) -> None:  # fmt: skip
    """Only what the automation would schedule again begins again; the worker reports the others,
    from the exit code."""
    with restarting(prefect_server, **changes):
        run = Run(prefect_server, tmp_path, times=1, **fields)
        assert run.supervised() == 128 + signal.SIGKILL
    assert len(run.attempts()) == 1
    assert run.states() == ["Scheduled", "Pending", "Running"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("attempts", "last", "begins"),
    [(2, None, True), (3, None, False), (1, Completed(), False)],
    ids=["the last attempt", "too many attempts", "has ended"],
)
def test_only_a_running_run_with_attempts_left_is_taken_again(
    prefect_server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    attempts: int, last: State[Any] | None, begins: bool,
) -> None:  # fmt: skip
    """Others keep their state."""
    monkeypatch.setattr(crash_limit, "MAX_ATTEMPTS", 2)
    with restarting(prefect_server), get_client(sync_client=True) as client:
        run = Run(prefect_server, tmp_path, times=1)
        for _ in range(attempts):
            client.set_flow_run_state(UUID(run.id), Running(), force=True)
        if last is not None:
            client.set_flow_run_state(UUID(run.id), last, force=True)
        before = run.states()
        assert (restarted_engine.take_again(UUID(run.id)) is not None) == begins
    assert run.states() == [*before, *(["Pending"] if begins else [])]


def test_an_engine_that_was_asked_to_end_does_not_begin_again() -> None:
    """A worker that is stopped, or that cancels a run, kills an engine which does not end."""
    program = (
        "import sys; from trialflow.flows.lifecycle import detached_engine as it; "
        "it.ENGINE = 'tests.support.scripts.stubborn_engine'; sys.exit(it.Supervisor([]).run())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdout is not None
        engine = int(supervisor.stdout.readline())
        try:
            supervisor.send_signal(signal.SIGTERM)
            assert supervisor.stdout.readline() == "asked\n"
            os.kill(engine, signal.SIGKILL)
            assert supervisor.wait() == 128 + signal.SIGKILL
        finally:
            supervisor.kill()
            kill(engine)


def test_a_signal_to_a_supervisor_that_starts_an_engine_reaches_the_engine() -> None:
    """A worker that is stopped at that moment does not wait for it."""
    program = (
        "import os, signal, subprocess, sys; "
        "from trialflow.flows.lifecycle import detached_engine as it; "
        "it.ENGINE, start = 'code', subprocess.Popen; "  # it reads its input until the end
        "subprocess.Popen = lambda *given, **more: "
        "os.kill(os.getpid(), signal.SIGTERM) or start(*given, **more); "
        "sys.exit(it.Supervisor([]).run())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as supervisor:
        try:
            assert supervisor.wait(WAIT_SECONDS) == 128 + signal.SIGTERM
        finally:
            supervisor.kill()


def test_engines_that_are_killed_while_they_start_are_given_up(
    prefect_server: PrefectServer, tmp_path: Path
) -> None:
    """Before they can look at the run, as where memory is short; the run's state has the cause."""
    with prefect_server.configured(), get_client(sync_client=True) as client:
        run = client.create_flow_run(train, state=Running()).id
    starts = tmp_path / "starts"
    (tmp_path / "killed_at_once.py").write_text(
        f"import os; open({str(starts)!r}, 'a').write('x'); os.kill(os.getpid(), 9)"
    )
    program = (
        "import sys; from trialflow.flows.lifecycle import detached_engine as it; "
        "it.ENGINE = it.RESTARTED_ENGINE = 'killed_at_once'; it.PAUSES_SECONDS = (0.0, 0.1); "
        "sys.exit(it.Supervisor(sys.argv[1:]).run())"
    )
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    ended = subprocess.run(
        [sys.executable, "-c", program, str(run)],
        cwd=ROOT,
        env={**os.environ, **prefect_server.environment, **path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 128 + signal.SIGKILL
    assert starts.read_text() == "xxx"
    cause = "ended by SIGKILL 3 times, each within 60 s of its start"
    assert cause in ended.stderr
    with prefect_server.configured():
        state = whole_state_of(run)
    assert state.name == "Crashed"
    assert cause in str(state.message)
