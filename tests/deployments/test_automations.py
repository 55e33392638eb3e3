"""The automations: their triggers, and what they do on a real server."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger
from prefect.types._datetime import now

from tests.support.deploying import (
    POOL,
    change_automation,
    create_run,
    deploy,
    set_state,
)
from tests.support.prefect import PrefectServer
from tests.support.waiting import until
from trialflow.deployments.automations import (
    CRASH_SILENT,
    FAIL_UNSTARTABLE,
    MAX_FAILED_STARTS,
    RESTART_CRASHED,
    TAG,
    automations,
    crash_lost_starts,
)

ALL = {each.name: each for each in automations(["local"])}
each_automation = pytest.mark.parametrize("automation", ALL.values(), ids=ALL)


def trigger_of(automation: AutomationCore) -> EventTrigger:
    assert isinstance(automation.trigger, EventTrigger)
    return automation.trigger


def action_of(automation: AutomationCore) -> ChangeFlowRunState:
    (action,) = automation.actions
    assert isinstance(action, ChangeFlowRunState)
    return action


@each_automation
def test_no_crash_is_dropped(automation: AutomationCore) -> None:
    """A server on SQLite may drop the events that a proactive trigger expects."""
    trigger = trigger_of(automation)
    droppable = trigger.expect - trigger.after if trigger.after else set()
    assert "prefect.flow-run.Crashed" not in droppable
    assert "prefect.flow-run.Running" not in droppable or automation.name == RESTART_CRASHED


@each_automation
def test_no_automation_triggers_itself(automation: AutomationCore) -> None:
    """Its new state comes before the server has recorded that the trigger has fired."""
    assert f"prefect.flow-run.{action_of(automation).name}" not in trigger_of(automation).expect


@each_automation
def test_only_crashed_runs_are_rescheduled_by_force(automation: AutomationCore) -> None:
    """If the event of a run's end was dropped, the server refuses any other action."""
    if action_of(automation).force:
        trigger = trigger_of(automation)
        assert (trigger.after or trigger.expect) <= {
            "prefect.flow-run.Crashed", "prefect.flow-run.StartLost"
        }  # fmt: skip


# ------------------------------------------------------------------------------ real server


def make_quick(client: SyncPrefectClient, name: str) -> None:
    """Have an automation wait ten seconds, Prefect's minimum."""
    trigger = client.read_automations_by_name(name)[0].trigger
    within = timedelta(seconds=10)
    change_automation(client, name, trigger=trigger.model_copy(update={"within": within}))


def send_heartbeat(client: SyncPrefectClient, run: UUID) -> None:
    """As a run's process does."""
    event = {
        "id": str(uuid4()),
        "occurred": now("UTC").isoformat(),
        "event": "prefect.flow-run.heartbeat",
        "resource": {"prefect.resource.id": f"prefect.flow-run.{run}"},
        "related": [
            {
                "prefect.resource.id": f"prefect.{role}.{name}",
                "prefect.resource.role": role,
                "prefect.resource.name": name,
            }
            for role, name in (("work-pool", POOL), ("tag", TAG))
        ],
    }
    client.request("POST", "/events", json=[event])


def wait_for_trigger(server: PrefectServer, run: UUID) -> None:
    """Wait until a trigger of the server waits for the run: earlier events would not count."""
    with closing(sqlite3.connect(server.home / "prefect.db", timeout=60)) as database:
        of_run = "SELECT 1 FROM automation_bucket WHERE bucketing_key LIKE ?"
        until(lambda: database.execute(of_run, (f"%{run}%",)).fetchall(), "a bucket")


def states(client: SyncPrefectClient, run: UUID) -> list[str]:
    """The names of all states of a run, in their order."""
    found = sorted(client.read_flow_run_states(run), key=lambda state: state.timestamp)
    return [str(state.name) for state in found]


def runs(client: SyncPrefectClient, folder: Path, count: int) -> Iterator[UUID]:
    return (create_run(client, folder) for _ in range(count))


@pytest.mark.long
@pytest.mark.server
def test_a_crashed_run_is_scheduled_again(
    client: SyncPrefectClient, prefect_server: PrefectServer, tmp_path: Path
) -> None:
    """Once, even if its crash is reported twice; not a run that never started."""
    deploy(client)
    run, never_ran = runs(client, tmp_path, 2)
    set_state(client, never_ran, "Crashed")
    set_state(client, run, "Pending")
    set_state(client, run, "Running")
    send_heartbeat(client, run)
    wait_for_trigger(prefect_server, run)
    set_state(client, run, "Crashed")
    set_state(client, run, "Crashed", force=False)
    until(lambda: client.read_flow_run(run).state_name == "AwaitingRetry", "scheduled again")
    assert states(client, run) == ["Scheduled", "Pending", "Running", "Crashed", "AwaitingRetry"]
    assert client.read_flow_run(never_ran).state_name == "Crashed"


def crash(client: SyncPrefectClient, run: UUID) -> None:
    """The run crashes, and the automation schedules it again: here at once, not after 10 s."""
    set_state(client, run, "Crashed")
    action = action_of(ALL[RESTART_CRASHED])
    state = {"type": "SCHEDULED", "name": action.name, "message": action.message}
    body = {"state": state, "force": action.force}
    client.request("POST", f"/flow_runs/{run}/set_state", json=body)


def fail_to_start(client: SyncPrefectClient, run: UUID, times: int) -> None:
    """A worker takes the run, which crashes before its flow begins."""
    for _ in range(times):
        set_state(client, run, "Pending")
        crash(client, run)


def keep_only(client: SyncPrefectClient, name: str) -> None:
    """Delete the other automations, so that the server drops none of a test's many events."""
    for other in set(ALL) - {name}:
        for found in client.read_automations_by_name(other):
            client.delete_automation(found.id)


@pytest.mark.long
@pytest.mark.server
def test_a_run_that_cannot_start_fails(
    client: SyncPrefectClient, prefect_server: PrefectServer, tmp_path: Path
) -> None:
    """A run that crashes before its flow begins is not scheduled for ever. The count starts anew
    when the flow begins."""
    deploy(client)
    keep_only(client, FAIL_UNSTARTABLE)
    (run,) = runs(client, tmp_path, 1)
    for _ in range(2):
        set_state(client, run, "Running")
        crash(client, run)
        wait_for_trigger(prefect_server, run)
        fail_to_start(client, run, MAX_FAILED_STARTS - 1)
    fail_to_start(client, run, 1)
    until(lambda: client.read_flow_run(run).state_name == "Failed", "failed")
    assert states(client, run).count("Failed") == 1
    assert "The worker's log shows the cause" in str(client.read_flow_run(run).state)


@pytest.mark.long
@pytest.mark.server
def test_a_retried_run_that_cannot_start_fails_again(
    client: SyncPrefectClient, prefect_server: PrefectServer, tmp_path: Path
) -> None:
    """On the same day. The worker's late report of the crash changes nothing."""
    deploy(client)
    keep_only(client, FAIL_UNSTARTABLE)
    (run,) = runs(client, tmp_path, 1)
    set_state(client, run, "Running")
    for _ in range(2):
        crash(client, run)
        wait_for_trigger(prefect_server, run)
        fail_to_start(client, run, MAX_FAILED_STARTS)
        until(lambda: client.read_flow_run(run).state_name == "Failed", "failed")
        set_state(client, run, "Crashed", force=False)
        assert client.read_flow_run(run).state_name == "Failed"
        set_state(client, run, "Scheduled")


@pytest.mark.long
@pytest.mark.server
def test_a_silent_run_is_marked_as_crashed(
    client: SyncPrefectClient, prefect_server: PrefectServer, tmp_path: Path
) -> None:
    """A run that is back in its queue is not."""
    deploy(client)
    make_quick(client, CRASH_SILENT)
    dead, waiting = runs(client, tmp_path, 2)
    for run in (dead, waiting):
        set_state(client, run, "Running")
        send_heartbeat(client, run)
        wait_for_trigger(prefect_server, run)
    set_state(client, waiting, "Scheduled")
    until(lambda: "Crashed" in states(client, dead), "crashed")
    assert "Crashed" not in states(client, waiting)


@pytest.mark.long
@pytest.mark.server
def test_a_lost_start_is_repeated(
    client: SyncPrefectClient, prefect_server: PrefectServer, tmp_path: Path
) -> None:
    """A run that has started is left alone. For one that crashed, the server refuses the action."""
    deploy(client)
    make_quick(client, crash_lost_starts(POOL))
    started, crashed, lost = runs(client, tmp_path, 3)
    for run in (started, crashed, lost):
        set_state(client, run, "Pending")
        wait_for_trigger(prefect_server, run)
    set_state(client, started, "Running")
    set_state(client, crashed, "Crashed")

    def is_repeated() -> bool:
        send_heartbeat(client, started)
        return client.read_flow_run(lost).state_name == "AwaitingRetry"

    until(is_repeated, "a repeated start")
    assert states(client, lost) == ["Scheduled", "Pending", "StartLost", "AwaitingRetry"]
    refused = {"filter": {"event": {"name": ["prefect.automation.action.failed"]}}}
    until(
        lambda: client.request("POST", "/events/filter", json=refused).json()["events"], "refused"
    )
    assert client.read_flow_run(started).state_name == "Running"
    assert client.read_flow_run(crashed).state_name == "Crashed"
