"""`trialflow deploy` against a real server: what is set up, left alone, done by itself, removed."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import (
    DeploymentScheduleCreate,
    DeploymentUpdate,
    WorkPoolCreate,
    WorkPoolUpdate,
)
from prefect.client.schemas.schedules import CronSchedule
from prefect.events.schemas.automations import AutomationCore
from prefect.types._datetime import now

from tests.support.cli import trialflow
from tests.support.prefect import PrefectServer
from tests.support.slots import toy_config
from trial_core.errors import ConfigError
from trialflow.deployments.cli.deploy import resolve_pool, wanted_resources
from trialflow.deployments.cli.up import elsewhere
from trialflow.deployments.desired_state import (
    CRASHED_RUNS_GO_ON,
    LOST_STARTS_ARE_REPEATED,
    SILENT_RUNS_HAVE_CRASHED,
    TAG,
    lost_starts_have_crashed,
)
from trialflow.deployments.flow_deployment import working_folder
from trialflow.deployments.local_worker import requeue_interrupted_starts
from trialflow.deployments.resources import Change, lease_problem, set_up, take_down
from trialflow.flows.lifecycle.crash_limit import (
    SCHEDULED_AGAIN,
    CrashedTooOften,
    check_crash_limit,
)

pytestmark = pytest.mark.server

POOL = "deployed"
PATIENCE_SECONDS = 90.0
ALL = [
    f"work pool {POOL} (process)",
    "concurrency limit gpu of 4",
    "deployment train/train",
    "deployment evaluate/evaluate",
    "deployment prune/prune",
    "deployment retrain/retrain",
    f"automation {CRASHED_RUNS_GO_ON!r}",
    f"automation {SILENT_RUNS_HAVE_CRASHED!r}",
    f"automation {lost_starts_have_crashed(POOL)!r}",
    f"automation {LOST_STARTS_ARE_REPEATED!r}",
]


def until(is_so: Callable[[], Any], what: str) -> Any:
    """Wait until it is so; what it then is."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := is_so()):
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.1)
    return found


@pytest.fixture
def client(prefect_server: PrefectServer) -> Iterator[SyncPrefectClient]:
    """Of a server on which nothing is left of what a test has set up."""
    with prefect_server.configured(), get_client(sync_client=True) as client:
        yield client
        for _ in take_down(reversed(wanted_resources("process", POOL, 4, None)), client, False):
            pass


def deploy(client: SyncPrefectClient, dry_run: bool = False, **asked: Any) -> dict[str, str]:
    """What was done about each thing; as a rule with four GPUs."""
    arguments = {"gpus": 4, "directory": Path("/srv/runs"), **asked}
    things = wanted_resources("process", POOL, arguments.pop("gpus"), **arguments)
    return {done.resource: done.verb for done in set_up(things, client, dry_run)}


def remove(client: SyncPrefectClient, dry_run: bool = False) -> dict[str, str]:
    things = wanted_resources("process", POOL, 4, None)
    return {done.resource: done.verb for done in take_down(reversed(things), client, dry_run)}


def change_rule(client: SyncPrefectClient, name: str, **fields: Any) -> None:
    """What a person does in the UI."""
    (rule,) = client.read_automations_by_name(name)
    now = rule.model_dump(exclude={"id", "owner_resource"})
    client.update_automation(rule.id, AutomationCore(**{**now, **fields}))


def make_quick(client: SyncPrefectClient, name: str) -> None:
    """Have an automation wait for ten seconds, Prefect's shortest."""
    trigger = client.read_automations_by_name(name)[0].trigger
    change_rule(client, name, trigger=trigger.model_copy(update={"within": timedelta(seconds=10)}))


def test_the_second_time_changes_nothing(client: SyncPrefectClient) -> None:
    """A dry run does nothing; the first time creates all; the second finds it; then it can go."""
    assert deploy(client, dry_run=True) == dict.fromkeys(ALL, "created")
    assert deploy(client) == dict.fromkeys(ALL, "created")
    deployment = client.read_deployment_by_name("train/train")
    assert deploy(client) == dict.fromkeys(ALL, "unchanged")
    assert client.read_deployment_by_name("train/train") == deployment
    assert remove(client, dry_run=True) == dict.fromkeys(reversed(ALL), "removed")
    assert remove(client) == dict.fromkeys(reversed(ALL), "removed")
    assert remove(client) == dict.fromkeys(reversed(ALL), "not there")


def test_what_a_person_has_set_stays(client: SyncPrefectClient) -> None:
    """A schedule, default parameters, job variables and a paused automation survive a change of
    what is ours."""
    deploy(client)
    found = client.read_deployment_by_name("prune/prune")
    schedule = DeploymentScheduleCreate(schedule=CronSchedule(cron="0 3 * * *"), slug="nightly")
    client.create_deployment_schedules(found.id, [schedule])
    client.request(
        "PATCH", f"/deployments/{found.id}",
        json={"parameters": {"dry_run": False}, "job_variables": {"env": {"MINE": "1"}}},
    )  # fmt: skip
    change_rule(client, SILENT_RUNS_HAVE_CRASHED, enabled=False, description="other")

    done = deploy(client, directory=Path("/elsewhere"))
    assert done["deployment prune/prune"] == "changed"
    assert done[f"automation {SILENT_RUNS_HAVE_CRASHED!r}"] == "changed"
    after = client.read_deployment_by_name("prune/prune")
    assert [each.slug for each in after.schedules] == ["nightly"]
    assert after.parameters == {"dry_run": False}
    assert after.job_variables["env"] == {"MINE": "1", "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}
    assert "/elsewhere" in str(after.pull_steps)
    assert not client.read_automations_by_name(SILENT_RUNS_HAVE_CRASHED)[0].enabled


def test_what_is_not_given_stays(client: SyncPrefectClient) -> None:
    """Neither pool nor folder is changed by a run without them, nor is the pool `local` made; what
    is given is."""
    deploy(client)
    assert resolve_pool(client, None, None) == ("process", POOL)
    client.create_work_pool(WorkPoolCreate(name="mine", type="process"))
    try:
        mine = wanted_resources("process", "mine", None, None)
        moved = {done.resource: done.detail for done in set_up(mine, client, False)}
        assert moved["deployment train/train"] == "work pool"
        assert resolve_pool(client, None, None) == ("process", "mine")
        done = {each.verb for each in again(client, POOL)}
        assert done == {"unchanged"}
        found = client.read_deployment_by_name("train/train")
        assert (found.work_pool_name, working_folder(found)) == ("mine", "/srv/runs")
    finally:
        client.delete_work_pool("mine")
    # A deployment without a pool would never be run.
    assert {"changed", "unchanged"} == {each.verb for each in again(client, POOL)}
    assert client.read_deployment_by_name("train/train").work_pool_name == POOL


def again(client: SyncPrefectClient, pool: str) -> list[Change]:
    """What is done when neither pool nor folder is given."""
    return list(set_up(wanted_resources("process", pool, 4, None, keeps_pool=True), client, False))


def test_a_folder_of_this_machine_is_not_an_images(client: SyncPrefectClient) -> None:
    """Moved to a pool of containers, deployments lose it."""
    deploy(client)
    client.create_work_pool(WorkPoolCreate(name="boxes", type="docker"))
    try:
        list(set_up(wanted_resources("docker", "boxes", None, None), client, False))
        assert client.read_deployment_by_name("train/train").pull_steps == []
        assert resolve_pool(client, None, None) == ("docker", "boxes")
    finally:
        client.delete_work_pool("boxes")


def test_what_others_have_made_is_kept(client: SyncPrefectClient) -> None:
    """A deployment of ours by name alone is refused, both ways, before anything has changed; so is
    removing with a wrong type. The limit stays unless --gpus is given, and a dry run says so."""
    deploy(client)
    asked_nothing = wanted_resources("process", POOL, None, None, is_removal=True)
    would = {done.resource: done.detail for done in take_down(asked_nothing, client, True)}
    assert would["concurrency limit gpu"] == "was not asked for: --gpus"
    with pytest.raises(ConfigError, match="give --type process"):
        list(take_down(reversed(wanted_resources("docker", POOL, 4, None)), client, False))

    found = client.read_deployment_by_name("prune/prune")
    client.update_deployment(found.id, DeploymentUpdate(entrypoint="theirs.py:prune"))
    with pytest.raises(ConfigError, match=r"somebody else's: it runs theirs\.py:prune"):
        remove(client)
    with pytest.raises(ConfigError, match="somebody else's"):
        deploy(client, gpus=8)
    client.update_deployment(found.id, DeploymentUpdate(entrypoint="trialflow.flows.prune.prune"))
    assert deploy(client) == dict.fromkeys(ALL, "unchanged")


def test_queued_runs_that_go_are_counted(client: SyncPrefectClient, tmp_path: Path) -> None:
    """Those that Prefect deletes with their deployment; not one that has started."""
    deploy(client)
    for run in [a_run(client, tmp_path) for _ in range(3)][:1]:
        report(client, run, "Running")
        report(client, run, "Scheduled")
    things = wanted_resources("process", POOL, 4, None)
    details = {done.resource: done.detail for done in take_down(things, client, dry_run=True)}
    assert details["deployment train/train"] == "and 2 runs that had not started yet"


@pytest.mark.parametrize("name", ["a/b", "50%", "", " "])
def test_names_that_prefect_does_not_take(client: SyncPrefectClient, name: str) -> None:
    """Refused as a mistake of whoever gave them."""
    with pytest.raises(ConfigError, match="cannot be the name of a work pool"):
        resolve_pool(client, None, name)


def test_up_says_what_is_elsewhere(client: SyncPrefectClient) -> None:
    """Deployments in a pool that its worker does not serve, and a folder that is not this one."""
    deploy(client, directory=Path.cwd())
    assert elsewhere(client, POOL) == []
    deploy(client)
    pools = elsewhere(client, "local")
    assert "train is in the work pool deployed" in pools[0]
    assert "/srv/runs" in pools[4]
    assert len(pools) == 5


def test_a_worker_makes_no_pool(prefect_server: PrefectServer, tmp_path: Path) -> None:
    """It would have Prefect's own job template; a name mistyped is told, and what to do."""
    told = trialflow(tmp_path, "worker", "--pool", "mistyped", variables=prefect_server.environment)
    assert (told.returncode, told.stdout) == (2, "")
    assert "no work pool 'mistyped': `trialflow deploy --pool mistyped` first" in told.stderr


def test_an_interrupted_start_is_made_again(client: SyncPrefectClient, tmp_path: Path) -> None:
    """A run that a worker was starting when it was stopped is in its queue again; others are left
    alone."""
    deploy(client)
    interrupted, running = a_run(client, tmp_path), a_run(client, tmp_path)
    report(client, interrupted, "Pending")
    report(client, running, "Running")
    assert requeue_interrupted_starts(client, "another") == 0
    assert requeue_interrupted_starts(client, POOL) == 1
    found = client.read_flow_run(interrupted)
    assert (found.state_name, found.next_scheduled_start_time is None) == ("AwaitingRetry", False)
    assert client.read_flow_run(running).state_name == "Running"


def test_a_limit_can_be_another(client: SyncPrefectClient) -> None:
    """--gpus again with another number changes the limit; without it, the limit is left alone."""
    deploy(client)
    assert deploy(client, gpus=8)["concurrency limit gpu of 8"] == "changed"
    assert not any("gpu" in thing for thing in deploy(client, gpus=None))
    assert client.read_global_concurrency_limit_by_name("gpu").limit == 8


def test_a_pool_of_somebody_else(client: SyncPrefectClient) -> None:
    """One of the same type is used as it is, or given our template if that is asked for, and is
    not removed; one of another type is refused."""
    deploy(client)
    template = client.read_work_pool(POOL).base_job_template
    update = WorkPoolUpdate(description="mine", base_job_template={})
    client.update_work_pool(POOL, update)
    assert deploy(client)[ALL[0]] == "unchanged"
    assert deploy(client, overwrite=True)[ALL[0]] == "changed"
    assert client.read_work_pool(POOL).base_job_template == template
    assert remove(client)[ALL[0]] == "kept"
    with pytest.raises(ConfigError, match=r"of type process, not docker: give --type process"):
        list(set_up(wanted_resources("docker", POOL, None, None), client, False))
    client.delete_work_pool(POOL)


@pytest.mark.parametrize("pool_type", ["docker", "kubernetes"])
def test_pools_of_other_types(client: SyncPrefectClient, pool_type: Any) -> None:
    """The server takes their templates; their runs have no working folder but their image's."""
    done = list(set_up(wanted_resources(pool_type, POOL, None, None), client, False))
    assert {each.verb for each in done} == {"created"}
    assert client.read_deployment_by_name("train/train").pull_steps == []
    done = list(set_up(wanted_resources(pool_type, POOL, None, None), client, False))
    assert {each.verb for each in done} == {"unchanged"}
    for _ in take_down(reversed(wanted_resources(pool_type, POOL, None, None)), client, False):
        pass


def a_run(client: SyncPrefectClient, folder: Path) -> UUID:
    """A run of `train` that no worker takes."""
    deployment = client.read_deployment_by_name("train/train")
    parameters = {"config": toy_config(folder).model_dump(mode="json")}
    return client.create_flow_run_from_deployment(deployment.id, parameters=parameters).id


def report(client: SyncPrefectClient, run: UUID, state: str, force: bool = True) -> None:
    """What a worker says of a run."""
    client.request(
        "POST", f"/flow_runs/{run}/set_state",
        json={"state": {"type": state.upper(), "name": state}, "force": force},
    )  # fmt: skip


def test_a_run_that_crashes_again_and_again_is_given_up(
    client: SyncPrefectClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the automation has scheduled it more often in a row than `max_restarts`. What Prefect
    calls late does not matter; a retry by hand begins a new count."""
    deploy(client)
    run = a_run(client, tmp_path)
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", str(run))
    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", "one")

    def schedule(name: str, message: str | None) -> None:
        state = {"type": "SCHEDULED", "name": name, "message": message}
        body = {"state": state, "force": True}
        client.request("POST", f"/flow_runs/{run}/set_state", json=body)

    for _ in range(3):
        schedule("AwaitingRetry", SCHEDULED_AGAIN)
        schedule("Late", None)
    check_crash_limit(3)
    with pytest.raises(CrashedTooOften, match="crashed 3 times in a row, and max_restarts is 2"):
        check_crash_limit(2)
    schedule("Scheduled", "Retried via CLI")
    check_crash_limit(0)


def heartbeat(client: SyncPrefectClient, run: UUID) -> None:
    """What a run's process says."""
    related = [("work-pool", POOL), ("tag", TAG)]
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
            for role, name in related
        ],
    }
    client.request("POST", "/events", json=[event])


def until_awaited(server: PrefectServer, run: UUID) -> None:
    """Wait until the server waits for news of a run: what comes earlier it has not to count."""
    with closing(sqlite3.connect(server.home / "prefect.db", timeout=60)) as database:
        of_run = "SELECT 1 FROM automation_bucket WHERE bucketing_key LIKE ?"
        until(lambda: database.execute(of_run, (f"%{run}%",)).fetchall(), "a bucket")


def names(client: SyncPrefectClient, run: UUID) -> list[str]:
    """Of the states that a run has had, in their order."""
    found = sorted(client.read_flow_run_states(run), key=lambda state: state.timestamp)
    return [str(state.name) for state in found]


def test_a_crashed_run_is_scheduled_again(
    client: SyncPrefectClient, prefect_server: PrefectServer, tmp_path: Path
) -> None:
    """One that has run; one that never came so far stays as it is: it would crash for ever. A
    second report of the same crash changes nothing."""
    deploy(client)
    run, never_ran = a_run(client, tmp_path), a_run(client, tmp_path)
    report(client, never_ran, "Crashed")
    report(client, run, "Pending")
    report(client, run, "Running")
    heartbeat(client, run)
    until_awaited(prefect_server, run)
    report(client, run, "Crashed")
    report(client, run, "Crashed", force=False)
    until(lambda: client.read_flow_run(run).state_name == "AwaitingRetry", "scheduled again")
    assert names(client, run) == ["Scheduled", "Pending", "Running", "Crashed", "AwaitingRetry"]
    assert client.read_flow_run(never_ran).state_name == "Crashed"


@pytest.mark.long
def test_a_silent_run_is_crashed(
    client: SyncPrefectClient, prefect_server: PrefectServer, tmp_path: Path
) -> None:
    """Of two runs whose heartbeats end, the one that was put back into its queue is left alone."""
    deploy(client)
    make_quick(client, SILENT_RUNS_HAVE_CRASHED)
    dead, waiting = a_run(client, tmp_path), a_run(client, tmp_path)
    for run in (dead, waiting):
        report(client, run, "Running")
        heartbeat(client, run)
        until_awaited(prefect_server, run)
    report(client, waiting, "Scheduled")
    until(lambda: "Crashed" in names(client, dead), "crashed")
    assert "Crashed" not in names(client, waiting)


@pytest.mark.long
def test_a_lost_start_is_repeated(
    client: SyncPrefectClient, prefect_server: PrefectServer, tmp_path: Path
) -> None:
    """Of runs that a worker has taken, one that has begun is left alone, and so is one that could
    not be started: the server refuses to let it crash again."""
    deploy(client)
    make_quick(client, lost_starts_have_crashed(POOL))
    begun, failed, lost = (a_run(client, tmp_path) for _ in range(3))
    for run in (begun, failed, lost):
        report(client, run, "Pending")
        until_awaited(prefect_server, run)
    report(client, begun, "Running")
    report(client, failed, "Crashed")

    def is_started_again() -> bool:
        heartbeat(client, begun)  # a run lives on, meanwhile
        return client.read_flow_run(lost).state_name == "AwaitingRetry"

    until(is_started_again, "started again")
    assert names(client, lost) == ["Scheduled", "Pending", "StartLost", "AwaitingRetry"]
    refused = {"filter": {"event": {"name": ["prefect.automation.action.failed"]}}}
    until(
        lambda: client.request("POST", "/events/filter", json=refused).json()["events"], "refused"
    )
    assert client.read_flow_run(begun).state_name == "Running"
    assert client.read_flow_run(failed).state_name == "Crashed"


@pytest.mark.parametrize(("pool_type", "is_watched"), [("process", True), ("docker", False)])
def test_a_container_may_wait_for_its_image(
    client: SyncPrefectClient, pool_type: Any, is_watched: bool
) -> None:
    """Its start counts as lost at no time."""
    list(set_up(wanted_resources(pool_type, POOL, None, None), client, False))
    assert bool(client.read_automations_by_name(lost_starts_have_crashed(POOL))) == is_watched
    for _ in take_down(reversed(wanted_resources(pool_type, POOL, None, None)), client, False):
        pass


def test_forgetful_leases_are_warned_of(client: SyncPrefectClient) -> None:
    """A server that keeps leases in its memory, as by default, and the setting that helps."""
    problem = lease_problem(client)
    assert problem is not None
    assert "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE=prefect.server" in problem


def test_the_command_says_what_it_does(
    client: SyncPrefectClient, prefect_server: PrefectServer, tmp_path: Path
) -> None:
    """A line a thing, then what is left to do; runs keep to the folder it is given in. Leases that
    do not last are warned of, without a limit on GPUs as well: deployments have limits too."""
    told = trialflow(
        tmp_path, "deploy", "--pool", POOL, "--gpus", "4", variables=prefect_server.environment
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines()[: len(ALL)] == [f"created: {thing}" for thing in ALL]
    assert told.stdout.endswith(f"trialflow worker --pool {POOL}\n")
    assert "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE" in told.stderr
    assert str(tmp_path) in str(client.read_deployment_by_name("train/train").pull_steps)
    told = trialflow(tmp_path, "deploy", "--dry-run", variables=prefect_server.environment)
    assert told.returncode == 0, told.stderr
    assert told.stderr.count("PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE") == 1


def test_without_a_server_there_is_nothing_to_set_up(tmp_path: Path) -> None:
    """It says which variable is missing, and what else there is for one machine."""
    told = trialflow(tmp_path, "deploy", variables={"PREFECT_API_URL": ""})
    assert told.returncode == 2
    assert "PREFECT_API_URL" in told.stderr
    assert "trialflow up" in told.stderr
