"""The final state of a stopped flow run, whatever others do to it while it saves.

On a real server, with a stand-in for training that waits for the stop request.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from prefect import flow, runtime, task
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.context import FlowRunContext
from prefect.exceptions import Abort, ObjectNotFound, Pause, TerminationSignal
from prefect.flow_runs import resume_flow_run
from prefect.states import Cancelling, Crashed, Failed, Paused, Running, Scheduled, Suspended

import trial_core.driver.drive
import trialflow.flows.lifecycle.flow_run_state
import trialflow.flows.lifecycle.stop_monitor
import trialflow.flows.train
from tests.flows.lifecycle.conftest import (
    TIMEOUT_SECONDS,
    Stage,
    set_state,
    state_of,
    whole_state_of,
)
from tests.support.stages import faking
from tests.support.waiting import until
from trial_core.driver.loop import Loop
from trial_core.errors import RankFailed, Stopped, StorageError
from trial_core.schedule.stop_requests import StopHandler
from trialflow.flows.lifecycle.parent_runs import ParentRuns, ParentStop
from trialflow.flows.train import TrialResult, train_trial
from trialflow.tasks.stages import as_prefect_task

pytestmark = pytest.mark.server


def suspended(flow_run: UUID, stopping: StopHandler) -> None:
    set_state(flow_run, Suspended(timeout_seconds=3600))
    assert stopping.wait(TIMEOUT_SECONDS)


def suspended_between_tasks(flow_run: UUID, stopping: StopHandler) -> None:
    """Prefect has noticed it in this process as well, before the run saves by a task."""
    request = getattr(FlowRunContext.get(), "flow_run_suspension_request", None)
    suspended(flow_run, stopping)
    if request is not None:
        until(request.is_requested, "Prefect's observer")
    save()


def suspended_and_resumed(flow_run: UUID, stopping: StopHandler) -> None:
    suspended(flow_run, stopping)
    set_state(flow_run, Scheduled())


def marked_crashed(flow_run: UUID, stopping: StopHandler) -> None:
    set_state(flow_run, Crashed())
    assert stopping.wait(TIMEOUT_SECONDS)


def marked_failed(flow_run: UUID, stopping: StopHandler) -> None:
    set_state(flow_run, Failed())
    assert stopping.wait(TIMEOUT_SECONDS)


def deleted(flow_run: UUID, stopping: StopHandler) -> None:
    """As a person does in the UI."""
    with get_client(sync_client=True) as client:
        client.delete_flow_run(flow_run)
    assert stopping.wait(TIMEOUT_SECONDS)


def out_of_time_and_suspended(flow_run: UUID, stopping: StopHandler) -> None:
    stopping.ask("time budget")
    assert stopping.wait(TIMEOUT_SECONDS)
    set_state(flow_run, Suspended(timeout_seconds=3600))


def preempted(flow_run: UUID, stopping: StopHandler) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    assert stopping.wait(TIMEOUT_SECONDS)


def preempted_and_cancelled(flow_run: UUID, stopping: StopHandler) -> None:
    preempted(flow_run, stopping)
    set_state(flow_run, Cancelling())


def preempted_and_unable_to_save(flow_run: UUID, stopping: StopHandler) -> None:
    preempted(flow_run, stopping)
    raise StorageError("503 SlowDown")


@pytest.mark.parametrize(
    ("act", "state"),
    [
        pytest.param(suspended, "Suspended", marks=pytest.mark.long),
        (suspended_and_resumed, "Scheduled"),
        (marked_crashed, "Crashed"),
        pytest.param(marked_failed, "Failed", marks=pytest.mark.long),
        pytest.param(out_of_time_and_suspended, "Suspended", marks=pytest.mark.long),
        (preempted_and_cancelled, "Cancelled"),
        (preempted_and_unable_to_save, "AwaitingRetry"),
    ],
)
def test_the_final_state(
    stage: Stage, act: Callable[[UUID, StopHandler], None], state: str
) -> None:
    """An unfinished run is never Completed, and a state set by others stays.

    Afterwards the signal handlers are restored.
    """
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    stage.act = act
    run, result = stage.train()
    assert not isinstance(result, TrialResult)
    assert state_of(run) == state
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def cancelled_through_a_worker(flow_run: UUID, stopping: StopHandler) -> None:
    """The worker sees the Cancel, and sends SIGTERM."""
    set_state(flow_run, Cancelling())
    preempted(flow_run, stopping)


def stopped_too_early(flow_run: UUID, stopping: StopHandler) -> None:
    cancelled_through_a_worker(flow_run, stopping)
    raise Stopped("nothing to save: training had not begun")


@pytest.mark.parametrize(
    ("act", "line"),
    [
        (
            cancelled_through_a_worker,
            "stopped: cancelled (in Prefect); saved at batch 10, checkpoint 4f0c21aa",
        ),
        pytest.param(
            stopped_too_early,
            "stopped: cancelled (in Prefect); nothing to save: training had not begun",
            marks=pytest.mark.long,
        ),
        pytest.param(
            preempted,
            "stopped: preempted (SIGTERM); saved at batch 10, checkpoint 4f0c21aa",
            marks=pytest.mark.long,
        ),
        (
            suspended_between_tasks,
            "stopped: suspended (in Prefect); saved at batch 10, checkpoint 4f0c21aa",
        ),
    ],
)
def test_the_log_of_a_stopped_run(
    stage: Stage, act: Callable[[UUID, StopHandler], None], line: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It ends with who asked and what was saved, then with Prefect's final state. No error."""
    if act is not suspended_between_tasks:  # the signal makes the monitor look, not its period
        monkeypatch.setattr(trialflow.flows.lifecycle.stop_monitor, "POLL_SECONDS", 600.0)
    stage.act = act
    run, _ = stage.train()
    log = stage.log(run)
    assert [text for level, text in log if level > logging.INFO] == []
    assert log[-2][1] == line
    assert log[-1][1].startswith(f"Finished in state {state_of(run)}(")


SHUTDOWN_FAILED = RankFailed(
    rank=1, host="here", during="callbacks", error_type="KeyError", error_message="'x'"
)


@pytest.mark.parametrize(
    "failure",
    [
        SHUTDOWN_FAILED,
        pytest.param(StorageError("no room for the run files"), marks=pytest.mark.long),
    ],
    ids=type,
)
def test_a_stop_that_saves_and_then_fails(
    stage: Stage, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log, the state and the report name the failure and the save. They deny no save."""
    report: Path | None = None

    def fail_after_the_save(loop: Loop) -> TrialResult:
        nonlocal report
        run = loop._launch.run
        loop._launch.status.can_save, report = True, run.run_dir / "report.md"
        cancelled_through_a_worker(UUID(str(runtime.flow_run.id)), run.stopping)
        run.observer.checkpoint_committed("4f0c21aa", 60, 1024)
        raise failure

    monkeypatch.setattr(trialflow.flows.train, "train_trial", train_trial)
    instant = faking(as_prefect_task, build_trial=lambda launch: None)
    monkeypatch.setattr(trialflow.flows.train, "as_prefect_task", instant)
    ranks = SimpleNamespace(stop=lambda: None)
    monkeypatch.setattr(
        trial_core.driver.drive, "launch_slots", lambda launch, placement: nullcontext(ranks)
    )
    monkeypatch.setattr(Loop, "run", fail_after_the_save)
    run, _ = stage.train()
    saved = f"{failure}; the last checkpoint is at batch 60"
    reason = f"cancelled (in Prefect); failed while stopping: {saved}"
    log = [text for _, text in stage.log(run)]
    assert log[-2] == f"stopped: {reason}"
    assert log[-1] == f"Finished in state Cancelled({f'Stopped: {reason}'!r})"
    assert report is not None
    assert saved in report.read_text().replace("\\", "")


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (signal.SIGINT, KeyboardInterrupt),
        pytest.param(signal.SIGTERM, TerminationSignal, marks=pytest.mark.long),
    ],
)
def test_a_signal_to_a_run_without_a_queue(
    stage: Stage, number: signal.Signals, error: type[BaseException]
) -> None:
    """It is Cancelled, not Crashed, and its caller gets the usual exception."""

    def stopped(flow_run: UUID, stopping: StopHandler) -> None:
        os.kill(os.getpid(), number)
        assert stopping.wait(TIMEOUT_SECONDS)

    stage.act = stopped
    with pytest.raises(error):
        trialflow.flows.train.train(stage.config)
    assert stage.training is not None
    log = stage.log(stage.training)
    assert state_of(stage.training) == "Cancelled"
    assert [text for level, text in log if level > logging.INFO] == []
    assert log[-2][1].startswith("stopped: interrupted (")
    assert log[-1][1].startswith("Finished in state Cancelled('Stopped: interrupted (")


@flow(name="pipeline")
def pipeline(config: dict[str, Any]) -> None:
    """Trains, then runs another task."""
    trialflow.flows.train.train(config)
    next_task()


@task(name="save")
def save() -> None:
    """Stands in for saving."""


@task(name="next-task")
def next_task() -> None:
    raise AssertionError("the flow was stopped, but continued")


def test_a_preempted_subflow_is_not_requeued(stage: Stage) -> None:
    """No worker would take it: SIGTERM ends its parent flow as well."""
    stage.act = preempted
    parent = stage.create_run(pipeline)
    with pytest.raises(TerminationSignal):
        stage.execute(pipeline, parent)
    assert stage.training is not None
    assert state_of(parent) == "Crashed"
    assert state_of(stage.training) == "Cancelled"  # it has saved


def test_a_preempted_run_of_a_deployment_within_a_flow_crashes(stage: Stage) -> None:
    """An automation schedules crashed runs again, and no cancelled ones."""
    stage.act = preempted
    with get_client(sync_client=True) as client:
        parent = client.create_flow_run(pipeline, state=Running())
    call = stage.server.query(
        "task_runs/", {"flow_run_id": str(parent.id), "task_key": "train", "dynamic_key": "0"}
    )
    run = stage.create_run(trialflow.flows.train.train, parent_task_run_id=call["id"])
    with pytest.raises(TerminationSignal):
        stage.execute(trialflow.flows.train.train, run)
    assert state_of(run) == "Crashed"


def test_a_subflow_is_suspended_with_its_parent(stage: Stage) -> None:
    """It saves and ends; the parent does not continue, and stays Suspended."""
    parent = stage.create_run(pipeline)
    stage.act = lambda flow_run, stopping: suspended(parent, stopping)
    with pytest.raises(Pause):
        stage.execute(pipeline, parent)
    state = whole_state_of(parent)
    assert (state.name, state.state_details.pause_timeout) == ("Suspended", None)
    assert stage.log(parent)[-1][1].startswith("Finished in state Suspended(")


@pytest.mark.parametrize(
    "pause",
    [
        Suspended,  # the button Pause of the UI
        # `pause_flow_run`, which expects a living process
        pytest.param(Paused, marks=pytest.mark.long),
    ],
    ids=["by the UI", "blocking"],
)
def test_a_pause_has_no_limit(stage: Stage, pause: Any) -> None:
    """A paused run saves and ends; Prefect never fails it, and Resume schedules it again."""

    def paused(flow_run: UUID, stopping: StopHandler) -> None:
        set_state(flow_run, pause(timeout_seconds=300))  # from now on
        assert stopping.wait(TIMEOUT_SECONDS)

    stage.act = paused
    run, end = stage.train()
    assert isinstance(end, Pause)
    assert str(end).startswith("suspended: suspended (in Prefect); saved at batch 10")
    state = whole_state_of(run)
    assert (state.name, state.state_details.pause_timeout) == ("Suspended", None)
    resume_flow_run(run)
    assert state_of(run) == "Resuming"


def test_a_pause_of_a_run_without_a_deployment(stage: Stage) -> None:
    """It is Cancelled, and its state says why: Prefect would refuse every Resume."""
    stage.act = suspended
    with pytest.raises(Abort, match="without a deployment cannot be resumed in Prefect"):
        trialflow.flows.train.train(stage.config)
    assert stage.training is not None
    state = whole_state_of(stage.training)
    assert state.name == "Cancelled"
    assert state.message is not None
    assert "saved at batch 10" in state.message


def test_the_time_budget_needs_no_server(stage: Stage) -> None:
    """A server that does not answer in time does not delay the end of the time budget."""
    requests: list[str] = []

    def out_of_time(flow_run: UUID, stopping: StopHandler) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                trialflow.flows.lifecycle.stop_monitor.StopMonitor,
                "_check_state",
                lambda self: stopping.wait(TIMEOUT_SECONDS),
            )
            assert stopping.wait(TIMEOUT_SECONDS)
            requests.append(str(stopping.request))

    stage.act = out_of_time
    stage.set_stopping(time_budget_seconds=0.5)
    run, result = stage.train()
    assert requests == ["time budget (0.5 s are over)"]
    assert state_of(run) == "Completed"
    assert isinstance(result, TrialResult)


def test_a_run_that_its_trial_has_ended(stage: Stage) -> None:
    """It is Completed. Its state says why, and has its result."""
    run, result = stage.train()
    state = whole_state_of(run)
    assert state.name == "Completed"
    assert state.message == "completed early: it is enough; saved at batch 10, checkpoint 4f0c21aa"
    assert isinstance(result, TrialResult)
    assert result.batches_trained == 10


def test_a_deleted_run_stops(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """It saves and ends. Its flow run stays deleted."""
    monkeypatch.setattr(trialflow.flows.lifecycle.flow_run_state, "DELETION_SECONDS", 0.2)
    stage.act = deleted
    run, result = stage.train()
    assert isinstance(result, Abort)
    assert str(result).startswith("cancelled (its flow run was deleted); saved at batch 10")
    with pytest.raises(ObjectNotFound):
        state_of(run)


def test_a_404_is_no_deletion(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training continues through a minute of 404 that no healthy server has answered."""
    reads: list[UUID] = []
    has_read_often = threading.Event()

    def read_flow_run(client: SyncPrefectClient, flow_run: UUID) -> Any:
        reads.append(flow_run)
        if len(reads) > 9:
            has_read_often.set()
        raise ObjectNotFound(http_exc=Exception("404"))

    def misbehaving(flow_run: UUID, stopping: StopHandler) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SyncPrefectClient, "read_flow_run", read_flow_run)
            assert has_read_often.wait(TIMEOUT_SECONDS)
        assert stopping.request is None

    stage.act = misbehaving
    run, result = stage.train()
    assert isinstance(result, TrialResult)
    assert state_of(run) == "Completed"


def presumed_dead(flow_run: UUID, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another attempt at the run starts."""
    set_state(flow_run, Running())


def superseded_parent(flow_run: UUID, monkeypatch: pytest.MonkeyPatch) -> None:
    parent_stops(flow_run, monkeypatch, is_superseded=True)


def parent_stops(
    flow_run: UUID, monkeypatch: pytest.MonkeyPatch, is_superseded: bool = False
) -> None:
    stop = ParentStop(flow_run, "cancelled", "with its parent", is_superseded)
    monkeypatch.setattr(ParentRuns, "stop", lambda self: stop)


def lost_supervisor(flow_run: UUID, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trialflow.flows.lifecycle.stop_monitor, "has_lost_supervisor", lambda: True)


def crashes(flow_run: UUID, monkeypatch: pytest.MonkeyPatch) -> None:
    set_state(flow_run, Crashed())


def resumed_at_once(flow_run: UUID, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect has noticed a Suspend that the server does not show any more."""
    request = getattr(FlowRunContext.get(), "flow_run_suspension_request", None)
    if request is None:
        pytest.skip("this Prefect shows a Suspend by the state alone")
    request.mark_requested(Suspended())


@pytest.mark.parametrize(
    ("asks", "happens"),
    [
        (crashes, presumed_dead),
        pytest.param(resumed_at_once, presumed_dead, marks=pytest.mark.long),
        (parent_stops, superseded_parent),  # parents are not asked of a run that has crashed
        pytest.param(crashes, lost_supervisor, marks=pytest.mark.long),
    ],
)
def test_what_ends_a_run_that_saves(
    stage: Stage,
    monkeypatch: pytest.MonkeyPatch,
    asks: Callable[[UUID, pytest.MonkeyPatch], None],
    happens: Callable[[UUID, pytest.MonkeyPatch], None],
) -> None:
    """It has been asked to stop, and is then killed: another attempt trains, or its worker asks
    again."""
    has_expired = threading.Event()

    def saving(flow_run: UUID, stopping: StopHandler) -> None:
        asks(flow_run, monkeypatch)
        assert stopping.wait(TIMEOUT_SECONDS)
        with stopping.subscribed(lambda: None, has_expired.set):
            happens(flow_run, monkeypatch)
            assert has_expired.wait(TIMEOUT_SECONDS)

    stage.set_stopping(grace_seconds=600.0)
    stage.act = saving
    stage.train()
    assert has_expired.is_set()


def test_a_run_whose_worker_was_stopped_saves(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes back into its queue."""
    requests: list[Any] = []

    def orphaned(flow_run: UUID, stopping: StopHandler) -> None:
        lost_supervisor(flow_run, monkeypatch)
        assert stopping.wait(TIMEOUT_SECONDS)
        requests.extend([str(stopping.request), stopping.has_expired])

    stage.act = orphaned
    run, _ = stage.train()
    assert requests == ["preempted (its worker was stopped)", False]
    assert state_of(run) == "AwaitingRetry"
