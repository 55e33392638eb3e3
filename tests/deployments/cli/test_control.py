"""`trialflow suspend`, `resume` and `cancel`: on a real server, and by a signal without one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.prefect import PrefectServer, isolated
from trialflow.deployments.cli.console import REFUSED
from trialflow.deployments.cli.main import main
from trialflow.flows.server.prefect_settings import environment

pytestmark = pytest.mark.server

TRIAL = "controlled-4f0c21aa93b7"
HOLDER = """
import sys, time
from trial_core.processes.machine.run_dirs import locked_run_dir

with locked_run_dir(sys.argv[1], task=sys.argv[2]):
    print("locked", flush=True)
    time.sleep(600)
"""


class Run:
    """A flow run on a real server that no process executes."""

    def __init__(
        self, server: PrefectServer, name: str, is_deployed: bool = True, of: str = "train"
    ) -> None:
        self.server = server
        flow = server.query("flows/", {"name": of})["id"]
        where, deployment = "flow_runs/", {"flow_id": flow}
        if is_deployed:
            created = server.query("deployments/", {"name": "controlled", "flow_id": flow})
            where, deployment = f"deployments/{created['id']}/create_flow_run", {}
        self.id = server.query(where, {**deployment, "name": name, "state": {"type": "PENDING"}})[
            "id"
        ]
        self.set_state("RUNNING")

    def set_state(self, kind: str) -> None:
        state = {"state": {"type": kind}, "force": True}
        self.server.query(f"flow_runs/{self.id}/set_state", state)

    @property
    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self.server.query(f"flow_runs/{self.id}")["state"]
        return found


@pytest.fixture
def server(
    prefect_server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PrefectServer]:
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path))
    with prefect_server.configured():
        yield prefect_server


@contextmanager
def training(trial: str, task: str = "", **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has locked a trial's folder, as a driver does."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, trial, task],
        env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
def test_a_run_of_a_deployment(server: PrefectServer, capsys: pytest.CaptureFixture[str]) -> None:
    """It is suspended without a limit, resumed and cancelled, by the trial's first characters."""
    Run(server, TRIAL).set_state("FAILED")  # an earlier run of the trial, which is over
    run = Run(server, TRIAL)
    assert main(["suspend", "controlled-4f", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["flow_run_id"] == run.id
    assert run.state["name"] == "Suspended"
    assert run.state["state_details"]["pause_timeout"] is None
    assert main(["resume", "controlled-4f"]) == 0
    assert run.state["name"] == "Resuming"
    run.set_state("RUNNING")
    assert main(["cancel", TRIAL]) == 0
    assert run.state["name"] == "Cancelling"
    run.set_state("CANCELLED")
    assert main(["cancel", TRIAL]) == REFUSED, "it is over"


@pytest.mark.long
def test_what_is_refused(server: PrefectServer, capsys: pytest.CaptureFixture[str]) -> None:
    """What Prefect cannot do; several trials; no trial, no run. The error says what to do instead.

    A run of another flow is not a trial's, although Prefect has given it a name that begins so.
    """
    first, second = Run(server, "refused-1", is_deployed=False), Run(server, "retrain refused-2")
    other = Run(server, "flying-fox", is_deployed=False, of="other")
    for command, error in (
        (("suspend", "refused-1"), "`trialflow cancel refused-1` saves, too"),
        (("resume", "refused-2"), "the run of trial refused-2 is Running, and Cannot resume"),
        (("cancel", "refused"), "refused is not one trial, but 2: refused-1, refused-2"),
        (("cancel", "refused-3"), "no run of a trial refused-3 is waiting, running or suspended"),
        (("cancel", "flying"), "no run of a trial flying is waiting, running or suspended"),
        (("cancel", ""), "the id of the trial is empty"),
    ):
        assert main(command) == REFUSED
        assert error in capsys.readouterr().err
    runs = (first, second, other)
    assert [run.state["name"] for run in runs] == ["Running"] * 3
    for run in runs:
        run.set_state("FAILED")


def test_a_run_without_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cancel sends SIGTERM to its process. It does not if that belongs to a worker's server.

    A worker would start the run again.
    """
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with environment(isolated(tmp_path / "prefect")):
        with training("of-a-worker-1", PREFECT__FLOW_RUN_ID="4f0c21aa") as process:
            assert main(["cancel", "of-a-worker"]) == REFUSED
            assert "set PREFECT_API_URL" in capsys.readouterr().err
            assert process.poll() is None
        with training("of-a-script-1") as process:
            assert main(["suspend", "of-a-script"]) == REFUSED
            assert main(["cancel", "of-a-script", "--json"]) == 0
            asked = json.loads(capsys.readouterr().out)
            assert (asked["trial"], asked["flow_run_id"]) == ("of-a-script-1", None)
            assert process.wait(30) == -signal.SIGTERM
        assert main(["cancel", "of-a-script"]) == REFUSED
        assert "PREFECT_API_URL is not set" in capsys.readouterr().err


def test_what_the_process_of_a_run_does_besides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trial of a search is not cancelled by a signal, which would end the whole search; the
    search is. It is said how each kind of run is continued."""
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with environment(isolated(tmp_path / "prefect")):
        with training("trial-1", "search sought-2") as process:
            for command in ("cancel", "suspend"):
                assert main([command, "trial"]) == REFUSED
                assert "`trialflow cancel sought-2` does that" in capsys.readouterr().err
            assert process.poll() is None
            assert main(["cancel", "sought"]) == 0
            assert "`trialflow search FILE … --resume --search sought-2`" in capsys.readouterr().out
            assert process.wait(30) == -signal.SIGTERM
        for task, later in (
            ("", "`trialflow train FILE … --resume --trial trial-1`, with the run's other options"),
            ("an evaluation", "trial-1 ends; an evaluation stores nothing"),
            ("a retraining", "`trialflow retrain` begins a new one"),
            ("a script", "if it is run again with latest_checkpoint"),
        ):
            with training("trial-1", task) as process:
                assert main(["cancel", "trial-1"]) == 0
                assert later in capsys.readouterr().out
