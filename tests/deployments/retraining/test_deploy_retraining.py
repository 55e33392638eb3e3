"""`trialflow deploy` with experiment files, on a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule

from tests.support.cli import trialflow, write_experiment
from tests.support.prefect import PrefectServer
from tests.support.slots import toy_config
from tests.support.waiting import until
from trialflow.deployments.cli.deploy import remove_withdrawn, wanted_resources
from trialflow.deployments.flow_deployment import models_on_server
from trialflow.deployments.resources import Pool, set_up, take_down
from trialflow.deployments.retraining import (
    SLUG,
    RetrainingRequest,
    all_resources,
    automation_name,
    retraining_requests,
)

pytestmark = pytest.mark.server

POOL = "retrained"
NIGHTLY = {"cron": "0 3 * * *", "timezone": "Europe/Berlin"}
DEPLOYMENT = "deployment retrain/gpt"
AUTOMATION = f"automation {automation_name('gpt')!r}"
NIGHTLY_SCHEDULE = "schedule of retrain/gpt (0 3 * * *, Europe/Berlin)"


@pytest.fixture
def client(prefect_server: PrefectServer) -> Iterator[SyncPrefectClient]:
    """A client; what a test has set up on the server is removed."""
    with prefect_server.configured(), get_client(sync_client=True) as client:
        yield client
        models = models_on_server(client)
        for _ in take_down(list(all_resources(models))[::-1], client, False):
            pass
        general = wanted_resources("process", POOL, None, None)
        for _ in take_down(reversed(general), client, False):
            pass


def requests(batches: int = 10, **section: Any) -> list[RetrainingRequest]:
    """The requests of a file with the model `gpt`."""
    section = {"model": "gpt", **section}
    return retraining_requests(
        {Path("gpt.yaml"): toy_config(Path("/nowhere"), batches, retraining=section)}
    )


def deploy(
    client: SyncPrefectClient,
    wanted: list[RetrainingRequest],
    dry_run: bool = False,
    pool: str = POOL,
    is_alone: bool = False,
) -> dict[str, str]:
    """Deploy; what was done with each resource of the model.

    Args:
        is_alone: without the deployments and automations that are not the model's.
    """
    models = models_on_server(client)
    things = wanted_resources("process", pool, None, None, retrainings=wanted, models=models)
    if is_alone:
        things = [each for each in things if isinstance(each, Pool) or "gpt" in each.title]
    done = [*set_up(things, client, dry_run), *remove_withdrawn(wanted, client, dry_run)]
    return {each.resource: each.verb for each in done if "gpt" in each.resource}


def read_deployment(client: SyncPrefectClient) -> DeploymentResponse:
    return client.read_deployment_by_name("retrain/gpt")


def test_the_second_time_changes_nothing(client: SyncPrefectClient) -> None:
    """A dry run changes nothing; the first deployment creates deployment, schedule and automation;
    the second leaves them unchanged; then they can be removed."""
    wanted = requests(schedule=NIGHTLY, on_data_arrived=True)
    assert deploy(client, wanted, dry_run=True, is_alone=True) == dict.fromkeys(
        [DEPLOYMENT, NIGHTLY_SCHEDULE, AUTOMATION], "created"
    )
    assert deploy(client, wanted, is_alone=True) == dict.fromkeys(
        [DEPLOYMENT, NIGHTLY_SCHEDULE, AUTOMATION], "created"
    )
    deployment, rules = (
        read_deployment(client),
        client.read_automations_by_name(automation_name("gpt")),
    )
    assert deployment.parameters == wanted[0].deployment.from_file
    assert deploy(client, wanted, is_alone=True) == dict.fromkeys(
        [DEPLOYMENT, NIGHTLY_SCHEDULE, AUTOMATION], "unchanged"
    )
    assert read_deployment(client) == deployment
    assert client.read_automations_by_name(automation_name("gpt")) == rules

    gone = {each.resource: each.verb for each in take_down(all_resources(["gpt"]), client, False)}
    assert gone == {DEPLOYMENT: "removed", AUTOMATION: "removed"}
    assert models_on_server(client) == []


@pytest.mark.long
def test_a_changed_file(client: SyncPrefectClient) -> None:
    """It changes its experiment and schedule, and removes what it no longer requests. Changes by
    people stay: another schedule, another parameter, a paused schedule."""
    deploy(client, requests(schedule=NIGHTLY, on_data_arrived=True))
    before = read_deployment(client)
    (ours,) = before.schedules
    on_schedule = {"data": {"on": "schedule"}}
    client.update_deployment_schedule(before.id, ours.id, active=False, parameters=on_schedule)
    theirs = DeploymentScheduleCreate(schedule=CronSchedule(cron="0 9 * * 1"), slug="mondays")
    client.create_deployment_schedules(before.id, [theirs])
    mine = {**before.parameters, "data": {"mine": 1}}
    client.request("PATCH", f"/deployments/{before.id}", json={"parameters": mine})

    wanted = requests(20, schedule={"interval_seconds": 90})
    every = "schedule of retrain/gpt (every 90 s)"
    assert deploy(client, wanted) == {
        DEPLOYMENT: "changed",
        every: "changed",
        AUTOMATION: "removed",
    }
    after = read_deployment(client)
    assert after.parameters == {**wanted[0].deployment.from_file, "data": {"mine": 1}}
    schedules = {each.slug: each for each in after.schedules}
    assert schedules[SLUG].schedule == wanted[0].schedule
    assert not schedules[SLUG].active
    assert schedules[SLUG].parameters == on_schedule
    assert schedules["mondays"].active
    assert deploy(client, wanted) == dict.fromkeys([DEPLOYMENT, every], "unchanged")

    assert deploy(client, requests(20))["schedule of retrain/gpt"] == "removed"
    assert [each.slug for each in read_deployment(client).schedules] == ["mondays"]


@pytest.mark.long
def test_deploying_without_the_file(client: SyncPrefectClient) -> None:
    """Without it, its deployment stays, and moves and is removed with the others."""
    deploy(client, requests(schedule=NIGHTLY))
    before = read_deployment(client)
    assert deploy(client, []) == {DEPLOYMENT: "unchanged"}
    assert deploy(client, [], pool="elsewhere") == {DEPLOYMENT: "changed"}
    moved = read_deployment(client)
    assert moved.work_pool_name == "elsewhere"
    assert (moved.parameters, moved.schedules) == (before.parameters, before.schedules)
    things = wanted_resources("process", "elsewhere", None, None, is_removal=True, models=["gpt"])
    gone = {each.resource: each.verb for each in take_down(reversed(things), client, False)}
    assert gone[DEPLOYMENT] == gone["deployment train/train"] == "removed"


@pytest.mark.long
def test_runs_are_scheduled(client: SyncPrefectClient) -> None:
    """The server schedules runs for three o'clock in Berlin; with another time it replaces them."""
    hours = {"cron": "0 3 * * *", "timezone": "Europe/Berlin"}, {"cron": "30 4 * * *"}
    zones = ZoneInfo("Europe/Berlin"), ZoneInfo("UTC")
    for schedule, zone, expected in zip(hours, zones, [(3, 0), (4, 30)], strict=True):
        deploy(client, requests(schedule=schedule))

        def times(zone: ZoneInfo = zone) -> set[tuple[int, int]]:
            runs = runs_of(client)
            began = [datetime.fromisoformat(run["expected_start_time"]) for run in runs]
            return {(each.astimezone(zone).hour, each.minute) for each in began}

        until(lambda times=times, expected=expected: times() == {expected}, f"runs at {expected}")


def runs_of(client: SyncPrefectClient) -> list[dict[str, Any]]:
    """The runs of the model's deployment."""
    body = {"deployments": {"id": {"any_": [str(read_deployment(client).id)]}}}
    runs: list[dict[str, Any]] = client.request("POST", "/flow_runs/filter", json=body).json()
    return runs


@pytest.mark.long
def test_arriving_data_starts_a_run(
    client: SyncPrefectClient, prefect_server: PrefectServer, tmp_path: Path
) -> None:
    """Data of any type is passed on unchanged, including quotes, templates and markup. Data for
    another model starts nothing."""
    wanted = requests(on_data_arrived=True)
    deploy(client, wanted)
    arrived = [
        "--data", "path=s3://bucket/it's \"new\"", "--data", "days=[1, 2.5, null]",
        "--data", "at.day='{{ event.id }} <b>&'", "--data", "at.is_whole=true",
    ]  # fmt: skip
    data = {
        "path": 's3://bucket/it\'s "new"',
        "days": [1, 2.5, None],
        "at": {"day": "{{ event.id }} <b>&", "is_whole": True},
    }
    for model in ("another", "gpt"):
        done = trialflow(
            tmp_path, "data-arrived", model, *arrived, variables=prefect_server.environment
        )
        assert done.returncode == 0, done.stderr
        said = f"sent trialflow.data.arrived: model {model} has new data: "
        assert done.stdout == f"{said}{json.dumps(data)}\n"
        assert ("no automation of this server" in done.stderr) == (model == "another")
    (run,) = until(lambda: runs_of(client), "a run")
    assert run["parameters"] == {**wanted[0].deployment.from_file, "data": data}


@pytest.mark.long
def test_the_commands_take_files(
    client: SyncPrefectClient, prefect_server: PrefectServer, tmp_path: Path
) -> None:
    """`deploy FILE` prints its changes; `--remove FILE` removes only what the file requests."""
    write_experiment(tmp_path, retraining={"model": "gpt", "schedule": NIGHTLY})
    variables = prefect_server.environment
    done = trialflow(tmp_path, "deploy", "experiment.yaml", "--pool", POOL, variables=variables)
    assert done.returncode == 0, done.stderr
    assert f"created: {DEPLOYMENT}\ncreated: {NIGHTLY_SCHEDULE}\n" in done.stdout
    done = trialflow(tmp_path, "deploy", "--remove", "experiment.yaml", variables=variables)
    rule, deployment = done.stdout.splitlines()
    assert rule == f"not found: {AUTOMATION}"
    # The number of removed runs depends on the scheduler.
    assert deployment.startswith(f"removed: {DEPLOYMENT}")
    assert client.read_deployment_by_name("train/train").work_pool_name == POOL


@pytest.mark.long
def test_data_arrived_is_refused(tmp_path: Path) -> None:
    """Without a server, with an invalid name, and with data that JSON lacks."""
    for arguments, refusal in [
        (["gpt"], "PREFECT_API_URL"),
        (["g/t"], "'g/t' is not a valid model name"),
        (["gpt", "--data", "x=.nan"], "data.x: nan cannot be stored as JSON"),
    ]:
        done = trialflow(tmp_path, "data-arrived", *arguments, variables={"PREFECT_API_URL": ""})
        assert (done.returncode, done.stdout) == (2, "")
        assert refusal in done.stderr
