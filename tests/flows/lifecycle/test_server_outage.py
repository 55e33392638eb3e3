"""A Prefect server that is away for a while costs a run nothing; one that never returns ends it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import httpx
import pytest
from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.exceptions import Abort, CancelledRun
from prefect.states import Crashed
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosedError
from websockets.frames import Close, CloseCode

import trial_core.driver.loop
import trialflow.deployments.automations
import trialflow.flows.lifecycle.stop_monitor
import trialflow.flows.train
from tests.flows.lifecycle.conftest import TIMEOUT_SECONDS, Stage, set_state, state_of
from tests.support.flow import stages, train
from tests.support.prefect import ROOT, PrefectServer, isolated
from tests.support.slots import toy_config
from tests.support.waiting import until
from tests.support.wire import UNAUTHORIZED, UNAVAILABLE, Wire, mend_at_the_end
from trial_core.config import ExperimentConfig
from trial_core.driver.loop import Loop
from trial_core.driver.uploads import Pruning, Uploads
from trial_core.schedule.stop_requests import StopHandler
from trialflow.flows.lifecycle import server_outage
from trialflow.flows.lifecycle.server_outage import ServerOutage
from trialflow.flows.server.embedded_server import flush
from trialflow.flows.train import TrialResult
from trialflow.tasks.artifact import MarkdownArtifact

pytestmark = pytest.mark.server

TASKS = 5


@flow(name="pipeline")
def pipeline(config: ExperimentConfig) -> None:
    trialflow.flows.train.train(config)


@task(cache_policy=NO_CACHE)
def step(number: int) -> None:
    get_run_logger().info("step %d", number)


def recorded(stage: Stage, run: UUID) -> tuple[list[str], set[str]]:
    """The states of the run's tasks, and the messages of its log."""
    tasks = stage.server.query("task_runs/filter", {"flow_runs": {"id": {"any_": [str(run)]}}})
    logs = stage.server.query("logs/filter", {"logs": {"flow_run_id": {"any_": [str(run)]}}})
    # A task's lines begin with its name.
    messages = {each["message"].rpartition(": ")[2] for each in logs}
    return [each["state_name"] for each in tasks], messages


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        pytest.param(UNAVAILABLE, marks=pytest.mark.long),
        pytest.param(
            UNAVAILABLE.replace(b"503 Service Unavailable", b"429 Too Many Requests"),
            marks=pytest.mark.long,
        ),
    ],
    ids=["cut", "503", "429"],
)
def test_what_happened_meanwhile_is_reported_later(
    stage: Stage, wire: Wire, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    """Tasks run, a report is written, and the flow ends, while the server is away, or a proxy
    answers in its place. Nothing of it is lost."""
    mend_at_the_end(wire, monkeypatch)

    def train_without_server(flow_run: UUID, stopping: StopHandler) -> None:
        step(0)
        wire.cut(answer)
        with pytest.raises(httpx.HTTPError):
            MarkdownArtifact("final report", "of a test").write("the last text")
        for number in range(1, TASKS):
            step(number)
        assert stopping.request is None

    stage.act = train_without_server
    stage.set_stopping(server_outage_seconds=None)
    run, result = stage.train()
    flush()
    assert isinstance(result, TrialResult)
    assert state_of(run) == "Completed"
    expected = {f"step {number}" for number in range(TASKS)}
    until(lambda: recorded(stage, run)[0] == ["Completed"] * TASKS, "the end of all tasks")
    until(lambda: expected <= recorded(stage, run)[1], "all log lines")
    (report,) = stage.server.query(
        "artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [str(run)]}}}
    )
    assert report["data"] == "the last text"


def test_a_connection_that_is_lost_while_it_logs_in(
    stage: Stage, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The events that wait for it are sent later. Prefect takes it for a refused login."""
    mend_at_the_end(wire, monkeypatch)
    recv, has_trained, is_lost = ClientConnection.recv, threading.Event(), threading.Event()

    async def recv_nothing(connection: ClientConnection) -> Any:
        if not is_lost.is_set():
            await recv(connection)  # the answer, which is lost
            wire.cut()
            await asyncio.to_thread(has_trained.wait, TIMEOUT_SECONDS)
            is_lost.set()
        return await recv(connection)

    def train_without_server(flow_run: UUID, stopping: StopHandler) -> None:
        monkeypatch.setattr(ClientConnection, "recv", recv_nothing)
        step(0)
        has_trained.set()
        assert is_lost.wait(TIMEOUT_SECONDS)

    stage.act = train_without_server
    stage.set_stopping(server_outage_seconds=None)
    run, _ = stage.train()
    flush()
    until(lambda: recorded(stage, run)[0] == ["Completed"], "the end of the task")


def test_a_login_that_is_refused_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server closes for its policy then; with another code when it restarts. One that always
    closes, or a proxy, is told of once."""
    monkeypatch.setattr(server_outage, "_lost_logins", 0)
    warnings: list[Any] = []
    client: Any = SimpleNamespace(_log_connection_error=warnings.append)

    def outcome(code: CloseCode) -> BaseException:
        async def closed(client: Any) -> None:
            raise RuntimeError("refused") from ConnectionClosedError(Close(code, ""), None)

        monkeypatch.setattr(server_outage, "_prefects_login", closed)
        with pytest.raises((RuntimeError, ConnectionClosedError)) as raised:
            asyncio.run(server_outage._log_in(client))
        return raised.value

    assert isinstance(outcome(CloseCode.POLICY_VIOLATION), RuntimeError)
    assert isinstance(outcome(CloseCode.SERVICE_RESTART), ConnectionClosedError)
    assert not warnings
    for _ in range(2 * server_outage.LOST_LOGINS):
        outcome(CloseCode.SERVICE_RESTART)
    assert len(warnings) == 1


@pytest.mark.long
def test_a_cancel_after_an_outage(stage: Stage, wire: Wire) -> None:
    """It is seen once the server answers again."""

    def cut_and_cancel(flow_run: UUID, stopping: StopHandler) -> None:
        wire.cut()
        stage.server.query(
            f"flow_runs/{flow_run}/set_state", {"state": {"type": "CANCELLING"}, "force": True}
        )
        assert not stopping.wait(0.5)  # several polls
        wire.mend()
        assert stopping.wait(TIMEOUT_SECONDS)

    stage.act = cut_and_cancel
    run, _ = stage.train()
    assert state_of(run) == "Cancelled"


@pytest.mark.long
def test_a_server_that_is_away_too_long_ends_the_run(stage: Stage, wire: Wire) -> None:
    """It is asked to stop, so it saves first. Nothing waits for the server any more."""
    reasons: list[Any] = []

    def train_without_server(flow_run: UUID, stopping: StopHandler) -> None:
        wire.cut()
        assert stopping.wait(TIMEOUT_SECONDS)
        reasons.append((str(stopping.request), stopping.seconds_left))
        step(1)

    stage.act = train_without_server
    stage.set_stopping(server_outage_seconds=0.3)
    _, result = stage.train()
    flush()
    assert isinstance(result, Abort)
    assert reasons == [("server lost (it has not answered for 0.3 s)", None)]


def test_a_server_that_was_started_again_with_another_password(stage: Stage, wire: Wire) -> None:
    """The run is not stopped, and its end does not wait for the server: it refuses for good."""

    def train_on(flow_run: UUID, stopping: StopHandler) -> None:
        wire.cut(UNAUTHORIZED)
        assert not stopping.wait(0.5)  # several polls

    stage.act = train_on
    stage.set_stopping(server_outage_seconds=60)  # not 3600: an end that waits is then seen
    with pytest.raises(httpx.HTTPStatusError, match="401"):
        stage.train()


@pytest.mark.long
def test_a_server_that_is_back_too_late(stage: Stage, wire: Wire) -> None:
    """An unfinished run is not Completed. It had no queue, so it does not go on by itself."""

    def cut_and_mend(flow_run: UUID, stopping: StopHandler) -> None:
        wire.cut()
        assert stopping.wait(TIMEOUT_SECONDS)
        wire.mend()

    stage.act = cut_and_mend
    stage.set_stopping(server_outage_seconds=0.3)
    run = stage.create_run(pipeline)
    with pytest.raises(CancelledRun):
        stage.execute(pipeline, run)
    assert stage.training is not None
    assert state_of(stage.training) == "Cancelled"


PROGRAM = """
from prefect.events import emit_event
from trialflow.flows.lifecycle import server_outage as it

it.LAST_REPORTS_SECONDS = 3600.0  # for a server that is there
outage = it.ServerOutage(3600.0)
with it.reports_kept(outage):
    it.PatientLogWorker.instance().send({"message": "kept"})
    emit_event("kept", {"prefect.resource.id": "some.resource"})
    outage.did_not_answer(outage.answers)
"""


@pytest.mark.long
def test_a_process_that_is_stopped_during_an_outage_ends(tmp_path: Path) -> None:
    """It does not wait for the server, which may be away for an hour."""
    variables = {**isolated(tmp_path), "PREFECT_API_URL": "http://127.0.0.1:9/api"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env={**os.environ, **variables},
        timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0


def test_a_run_that_was_called_silent_says_that_it_runs(stage: Stage) -> None:
    """A server that comes back counts the heartbeats that it missed, before it gets new ones."""
    message = trialflow.deployments.automations.automations([])[2].actions[0].message

    def call_silent(flow_run: UUID, stopping: StopHandler) -> None:
        for _ in range(2):
            set_state(flow_run, Crashed(message=message))
            until(lambda: state_of(flow_run) == "Running", "Running")
        assert not stopping.wait(0.5)  # several polls

    stage.act = call_silent
    run, result = stage.train()
    assert isinstance(result, TrialResult)
    assert state_of(run) == "Completed"


def test_the_length_of_an_outage() -> None:
    """It begins with the first request without an answer, and ends with an answer."""
    now = 100.0
    outage = ServerOutage(limit_seconds=10.0, clock=lambda: now)
    outage.did_not_answer(outage.answers)
    now = 109.9
    outage.did_not_answer(outage.answers)
    assert not outage.is_too_long
    now = 110.0
    assert outage.is_too_long
    outage.answered()
    assert not outage.is_too_long
    outage.did_not_answer(outage.answers)
    assert not outage.is_too_long
    assert not ServerOutage(limit_seconds=None).is_too_long


def test_a_late_failure_is_no_new_outage() -> None:
    """Of two requests, the one that was sent before the end of the outage fails after it: log lines
    would be given up at the end of the run."""
    outage = ServerOutage(limit_seconds=None)
    before = outage.answers
    outage.did_not_answer(before)
    outage.answered()
    outage.did_not_answer(before)
    assert not outage.is_on
    outage.did_not_answer(outage.answers)
    assert outage.is_on


@pytest.mark.long
@pytest.mark.slots
@pytest.mark.parametrize(
    ("owner", "step"),
    [
        (Loop, "_build_loaders"),
        (trial_core.driver.loop, "call_hook"),
        (Loop, "_train"),
        (Loop, "_validate"),
        (Loop, "_save"),
        (Uploads, "start"),
        (Uploads, "finish"),
        (Pruning, "finish"),
    ],
)
def test_an_outage_at_any_stage(
    here: Path, wire: Wire, prefect_server: PrefectServer, monkeypatch: pytest.MonkeyPatch,
    owner: Any, step: str,
) -> None:  # fmt: skip
    """It begins with that stage and lasts until the run waits at its end. Real ranks train."""
    work, is_cut = getattr(owner, step), threading.Event()
    mend_at_the_end(wire, monkeypatch)

    def cut_and_work(self: Any, *arguments: Any, **more: Any) -> Any:
        if not is_cut.is_set():
            is_cut.set()
            wire.cut()
        return work(self, *arguments, **more)

    monkeypatch.setattr(owner, step, cut_and_work)
    config = toy_config(here, 8, scheduling_unit=4, hyperparameters={"record": str(here)})
    result = train(config)
    assert is_cut.is_set()
    assert result.batches_trained == 8
    assert state_of(UUID(result.flow_run_id)) == "Completed"
    expected = {
        "build-trial", "build-loaders @0", "train-workload [0→4]", "train-workload [4→8]",
        "validate @8", "checkpoint-save @8", "checkpoint-upload @8",
    }  # fmt: skip
    seen = stages(prefect_server, result.flow_run_id, "checkpoint-upload @8")
    assert expected <= {each.name for each in seen}
    assert {each.state for each in seen} == {"Completed"}
    (report,) = prefect_server.query(
        "artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [result.flow_run_id]}}}
    )
    assert "completed" in report["data"]
