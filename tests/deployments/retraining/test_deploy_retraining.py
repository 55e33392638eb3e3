"""`trialflow deploy` with files: a model's deployment, its schedule, and what data arriving does,
on a real server."""

from __future__ import annotations

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
from trialflow.deployments.resources import set_up, take_down
from trialflow.deployments.retraining.model_resources import SLUG, all_of
from trialflow.deployments.retraining.requests import RetrainingRequest, retrainings, rule_name

pytestmark = pytest.mark.server

POOL = "retrained"
NIGHTLY = {"cron": "0 3 * * *", "timezone": "Europe/Berlin"}
DEPLOYMENT, RULE = "deployment retrain/gpt", f"automation {rule_name('gpt')!r}"
AT_THREE = "schedule of retrain/gpt (0 3 * * *, Europe/Berlin)"


@pytest.fixture
def client(prefect_server: PrefectServer) -> Iterator[SyncPrefectClient]:
    """Of a server on which nothing is left of what a test has set up."""
    with prefect_server.configured(), get_client(sync_client=True) as client:
        yield client
        models = models_on_server(client)
        for _ in take_down(list(all_of(models))[::-1], client, False):
            pass
        general = wanted_resources("process", POOL, None, None)
        for _ in take_down(reversed(general), client, False):
            pass


def asked(batches: int = 10, **section: Any) -> list[RetrainingRequest]:
    """What a file of the model `gpt` asks for."""
    section = {"model": "gpt", **section}
    return retrainings(
        {Path("gpt.yaml"): toy_config(Path("/nowhere"), batches, retraining=section)}
    )


def deploy(
    client: SyncPrefectClient,
    wanted: list[RetrainingRequest],
    dry_run: bool = False,
    pool: str = POOL,
) -> dict[str, str]:
    """What was done about each thing that is a model's."""
    models = models_on_server(client)
    things = wanted_resources("process", pool, None, None, retrainings=wanted, models=models)
    done = [*set_up(things, client, dry_run), *remove_withdrawn(wanted, client, dry_run)]
    return {each.resource: each.verb for each in done if "gpt" in each.resource}


def found(client: SyncPrefectClient) -> DeploymentResponse:
    return client.read_deployment_by_name("retrain/gpt")


def test_the_second_time_changes_nothing(client: SyncPrefectClient) -> None:
    """A dry run does nothing; the first time makes a deployment, its schedule and an automation;
    the second finds them; and then they can go."""
    file = asked(schedule=NIGHTLY, on_data_arrived=True)
    assert deploy(client, file, dry_run=True) == dict.fromkeys(
        [DEPLOYMENT, AT_THREE, RULE], "created"
    )
    assert deploy(client, file) == dict.fromkeys([DEPLOYMENT, AT_THREE, RULE], "created")
    deployment, rules = found(client), client.read_automations_by_name(rule_name("gpt"))
    assert deployment.parameters == file[0].deployment.from_file
    assert deploy(client, file) == dict.fromkeys([DEPLOYMENT, AT_THREE, RULE], "unchanged")
    assert found(client) == deployment
    assert client.read_automations_by_name(rule_name("gpt")) == rules

    gone = {each.resource: each.verb for each in take_down(all_of(["gpt"]), client, False)}
    assert gone == {DEPLOYMENT: "removed", RULE: "removed"}
    assert models_on_server(client) == []


def test_a_changed_file_changes_what_is_its_own(client: SyncPrefectClient) -> None:
    """Its experiment, its time, and what it does not ask for any more. What people have set stays:
    a schedule of theirs, another parameter, that the file's own schedule is paused."""
    deploy(client, asked(schedule=NIGHTLY, on_data_arrived=True))
    before = found(client)
    (ours,) = before.schedules
    client.update_deployment_schedule(before.id, ours.id, active=False)
    theirs = DeploymentScheduleCreate(schedule=CronSchedule(cron="0 9 * * 1"), slug="mondays")
    client.create_deployment_schedules(before.id, [theirs])
    mine = {**before.parameters, "data": {"mine": 1}}
    client.request("PATCH", f"/deployments/{before.id}", json={"parameters": mine})

    file = asked(20, schedule={"interval_seconds": 90})
    every = "schedule of retrain/gpt (every 90 s)"
    assert deploy(client, file) == {DEPLOYMENT: "changed", every: "changed", RULE: "removed"}
    after = found(client)
    assert after.parameters == {**file[0].deployment.from_file, "data": {"mine": 1}}
    schedules = {each.slug: each for each in after.schedules}
    assert schedules[SLUG].schedule == file[0].schedule
    assert not schedules[SLUG].active
    assert schedules["mondays"].active
    assert deploy(client, file) == dict.fromkeys([DEPLOYMENT, every], "unchanged")

    assert deploy(client, asked(20))["schedule of retrain/gpt"] == "removed"
    assert [each.slug for each in found(client).schedules] == ["mondays"]


def test_a_file_need_not_be_given_again(client: SyncPrefectClient) -> None:
    """Without it, its deployment stays as it is, moves with the others, and goes with them."""
    deploy(client, asked(schedule=NIGHTLY))
    before = found(client)
    assert deploy(client, []) == {DEPLOYMENT: "unchanged"}
    assert deploy(client, [], pool="elsewhere") == {DEPLOYMENT: "changed"}
    moved = found(client)
    assert moved.work_pool_name == "elsewhere"
    assert (moved.parameters, moved.schedules) == (before.parameters, before.schedules)
    things = wanted_resources("process", "elsewhere", None, None, is_removal=True, models=["gpt"])
    gone = {each.resource: each.verb for each in take_down(reversed(things), client, False)}
    assert gone[DEPLOYMENT] == gone["deployment train/train"] == "removed"


def test_runs_are_scheduled_at_the_files_time(client: SyncPrefectClient) -> None:
    """The server's scheduler makes runs for three o'clock in Berlin; with another time the runs of
    the old one are gone."""
    hours = {"cron": "0 3 * * *", "timezone": "Europe/Berlin"}, {"cron": "30 4 * * *"}
    zones = ZoneInfo("Europe/Berlin"), ZoneInfo("UTC")
    for schedule, zone, expected in zip(hours, zones, [(3, 0), (4, 30)], strict=True):
        deploy(client, asked(schedule=schedule))

        def times(zone: ZoneInfo = zone) -> set[tuple[int, int]]:
            runs = runs_of(client)
            began = [datetime.fromisoformat(run["expected_start_time"]) for run in runs]
            return {(each.astimezone(zone).hour, each.minute) for each in began}

        until(lambda times=times, expected=expected: times() == {expected}, f"runs at {expected}")


def runs_of(client: SyncPrefectClient) -> list[dict[str, Any]]:
    """The runs of the model's deployment."""
    body = {"deployments": {"id": {"any_": [str(found(client).id)]}}}
    runs: list[dict[str, Any]] = client.request("POST", "/flow_runs/filter", json=body).json()
    return runs


def test_data_that_arrives_starts_a_run_with_it(
    client: SyncPrefectClient, prefect_server: PrefectServer, tmp_path: Path
) -> None:
    """Whatever it is: nested, of any type, with quotes, or what Prefect's templates or markup would
    be. The experiment is the deployment's. Another model's data starts nothing."""
    file = asked(on_data_arrived=True)
    deploy(client, file)
    arrived = [
        "--data", "path=s3://bucket/it's \"new\"", "--data", "days=[1, 2.5, null]",
        "--set", "at.day='{{ event.id }} <b>&'", "--set", "at.is_whole=true",
    ]  # fmt: skip
    for model in ("another", "gpt"):
        told = trialflow(
            tmp_path, "data-arrived", model, *arrived, variables=prefect_server.environment
        )
        assert told.returncode == 0, told.stderr
        assert told.stdout == f"sent: trialflow.data.arrived of trialflow.model.{model}\n"
        assert ("no automation of this server" in told.stderr) == (model == "another")
    (run,) = until(lambda: runs_of(client), "a run")
    data = {
        "path": 's3://bucket/it\'s "new"',
        "days": [1, 2.5, None],
        "at": {"day": "{{ event.id }} <b>&", "is_whole": True},
    }
    assert run["parameters"] == {**file[0].deployment.from_file, "data": data}


def test_the_commands_take_files(
    client: SyncPrefectClient, prefect_server: PrefectServer, tmp_path: Path
) -> None:
    """`deploy FILE` says what it has done; `deploy --remove FILE` leaves everything else."""
    write_experiment(tmp_path, retraining={"model": "gpt", "schedule": NIGHTLY})
    variables = prefect_server.environment
    told = trialflow(tmp_path, "deploy", "experiment.yaml", "--pool", POOL, variables=variables)
    assert told.returncode == 0, told.stderr
    assert f"created: {DEPLOYMENT}\ncreated: {AT_THREE}\n" in told.stdout
    told = trialflow(tmp_path, "deploy", "--remove", "experiment.yaml", variables=variables)
    rule, deployment = told.stdout.splitlines()
    assert rule == f"not found: {RULE}"
    # How many runs go with it is the scheduler's doing.
    assert deployment.startswith(f"removed: {DEPLOYMENT}")
    assert client.read_deployment_by_name("train/train").work_pool_name == POOL


def test_without_a_server_nobody_hears_of_data(tmp_path: Path) -> None:
    """It is refused, and so is what cannot be sent."""
    for arguments, refusal in [
        (["gpt"], "PREFECT_API_URL"),
        (["g/t"], "'g/t' cannot be a model's name"),
        (["gpt", "--data", "x=.nan"], "an event is JSON"),
    ]:
        told = trialflow(tmp_path, "data-arrived", *arguments, variables={"PREFECT_API_URL": ""})
        assert (told.returncode, told.stdout) == (2, "")
        assert refusal in told.stderr
