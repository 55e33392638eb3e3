"""`trialflow deploy` against a real server: what it creates, keeps and removes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import (
    DeploymentScheduleCreate,
    DeploymentUpdate,
    WorkPoolCreate,
    WorkPoolUpdate,
)
from prefect.client.schemas.schedules import CronSchedule

from tests.support.cli import trialflow, write_experiment
from tests.support.deploying import (
    POOL,
    change_automation,
    create_run,
    deploy,
    remove,
    set_state,
)
from tests.support.json_types import check_json
from tests.support.prefect import PrefectServer
from tests.support.slots import toy_config
from trial_core.errors import ConfigError
from trialflow.deployments.automations import (
    CRASH_SILENT,
    FAIL_UNSTARTABLE,
    REPEAT_LOST_STARTS,
    RESTART_CRASHED,
    crash_lost_starts,
)
from trialflow.deployments.cli.deploy import file_schedules, resolve_pool, wanted_resources
from trialflow.deployments.cli.main import main
from trialflow.deployments.cli.up import location_warnings
from trialflow.deployments.desired_state import check_pool_name, deployments
from trialflow.deployments.flow_deployment import working_folder
from trialflow.deployments.local_worker import requeue_lost_runs
from trialflow.deployments.resources import Change, lease_problem, set_up, take_down
from trialflow.flows.lifecycle.crash_limit import (
    RESTARTED,
    SCHEDULED_AGAIN,
    CrashedTooOften,
    check_crash_limit,
)
from trialflow.flows.lifecycle.detached_engine import SUPERVISOR_MODULE

pytestmark = pytest.mark.server

ALL = [
    f"work pool {POOL} (process)",
    "concurrency limit gpu of 4",
    "deployment train/train",
    "deployment evaluate/evaluate",
    "deployment search/search",
    "deployment prune/prune",
    "deployment retrain/retrain",
    f"automation {RESTART_CRASHED!r}",
    f"automation {FAIL_UNSTARTABLE!r}",
    f"automation {CRASH_SILENT!r}",
    f"automation {crash_lost_starts(POOL)!r}",
    f"automation {REPEAT_LOST_STARTS!r}",
]


def test_deploying_twice_changes_nothing(client: SyncPrefectClient) -> None:
    """A dry run changes nothing, the first deploy creates all, the second finds it; then all of it
    can be removed."""
    assert deploy(client, dry_run=True) == dict.fromkeys(ALL, "created")
    assert deploy(client) == dict.fromkeys(ALL, "created")
    deployment = client.read_deployment_by_name("train/train")
    assert deploy(client) == dict.fromkeys(ALL, "unchanged")
    assert client.read_deployment_by_name("train/train") == deployment
    assert remove(client, dry_run=True) == dict.fromkeys(reversed(ALL), "removed")
    assert remove(client) == dict.fromkeys(reversed(ALL), "removed")
    assert remove(client) == dict.fromkeys(reversed(ALL), "not found")


def test_changes_made_in_the_ui_stay(client: SyncPrefectClient) -> None:
    """A schedule, default parameters, job variables and a paused automation survive an update."""
    changed = (ALL[0], "deployment prune/prune", f"automation {CRASH_SILENT!r}")
    deploy(client, only=changed)
    found = client.read_deployment_by_name("prune/prune")
    schedule = DeploymentScheduleCreate(schedule=CronSchedule(cron="0 3 * * *"), slug="nightly")
    client.create_deployment_schedules(found.id, [schedule])
    client.request(
        "PATCH", f"/deployments/{found.id}",
        json={"parameters": {"dry_run": False}, "job_variables": {"env": {"MINE": "1"}}},
    )  # fmt: skip
    change_automation(client, CRASH_SILENT, enabled=False, description="other")

    verbs = deploy(client, only=changed, directory=Path("/elsewhere"))
    assert verbs == dict(zip(changed, ("unchanged", "changed", "changed"), strict=True))
    after = client.read_deployment_by_name("prune/prune")
    assert [each.slug for each in after.schedules] == ["nightly"]
    assert after.parameters == {"dry_run": False}
    assert after.job_variables["env"] == {"MINE": "1", "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}
    assert "/elsewhere" in str(after.pull_steps)
    assert not client.read_automations_by_name(CRASH_SILENT)[0].enabled


@pytest.mark.long
def test_pool_and_folder_that_are_not_given_stay(client: SyncPrefectClient) -> None:
    """Deployments keep their pool and working folder, unless others are given."""

    def deploy_without_pool_and_folder(pool: str) -> list[Change]:
        resources = wanted_resources("process", pool, 4, None, keeps_pool=True)
        return list(set_up(resources, client, False))

    deploy(client)
    assert resolve_pool(client, None, None) == ("process", POOL)
    client.create_work_pool(WorkPoolCreate(name="mine", type="process"))
    try:
        mine = wanted_resources("process", "mine", None, None)
        details = {change.resource: change.detail for change in set_up(mine, client, False)}
        assert details["deployment train/train"] == "work pool"
        assert resolve_pool(client, None, None) == ("process", "mine")
        verbs = {change.verb for change in deploy_without_pool_and_folder(POOL)}
        assert verbs == {"unchanged"}
        found = client.read_deployment_by_name("train/train")
        assert (found.work_pool_name, working_folder(found)) == ("mine", "/srv/runs")
    finally:
        client.delete_work_pool("mine")
    # A deployment without a pool would never run.
    verbs = {change.verb for change in deploy_without_pool_and_folder(POOL)}
    assert verbs == {"changed", "unchanged"}
    assert client.read_deployment_by_name("train/train").work_pool_name == POOL


@pytest.mark.long
def test_a_container_has_no_folder_of_this_machine(client: SyncPrefectClient) -> None:
    """A deployment that moves to a pool of containers loses its working folder."""
    deploy(client)
    client.create_work_pool(WorkPoolCreate(name="boxes", type="docker"))
    try:
        list(set_up(wanted_resources("docker", "boxes", None, None), client, False))
        assert client.read_deployment_by_name("train/train").pull_steps == []
        assert resolve_pool(client, None, None) == ("docker", "boxes")
    finally:
        client.delete_work_pool("boxes")


@pytest.mark.long
def test_resources_of_others_are_refused(client: SyncPrefectClient) -> None:
    """A deployment with another entrypoint, or a pool of another type, is an error before anything
    changes. The GPU limit is kept unless --gpus is given."""
    deploy(client)
    without_gpus = wanted_resources("process", POOL, None, None, is_removal=True)
    details = {change.resource: change.detail for change in take_down(without_gpus, client, True)}
    assert details["concurrency limit gpu"] == "--gpus was not given"
    with pytest.raises(ConfigError, match="pass --type process"):
        list(take_down(reversed(wanted_resources("docker", POOL, 4, None)), client, False))

    found = client.read_deployment_by_name("prune/prune")
    client.update_deployment(found.id, DeploymentUpdate(entrypoint="theirs.py:prune"))
    with pytest.raises(ConfigError, match=r"not trialflow's: its entrypoint is theirs\.py:prune"):
        remove(client)
    with pytest.raises(ConfigError, match="not trialflow's"):
        deploy(client, gpus=8)
    client.update_deployment(found.id, DeploymentUpdate(entrypoint="trialflow.flows.prune.prune"))
    assert deploy(client) == dict.fromkeys(ALL, "unchanged")


@pytest.mark.long
def test_removal_counts_queued_runs(client: SyncPrefectClient, tmp_path: Path) -> None:
    """Prefect deletes them with their deployment; a run that has started before does not count."""
    deploy(client)
    started, _, _ = (create_run(client, tmp_path) for _ in range(3))
    set_state(client, started, "Running")
    set_state(client, started, "Scheduled")
    resources = wanted_resources("process", POOL, 4, None)
    details = {each.resource: each.detail for each in take_down(resources, client, dry_run=True)}
    assert details["deployment train/train"] == "with 2 runs that had not started"


@pytest.mark.parametrize("name", ["a/b", "50%", "", " "])
def test_invalid_pool_names(name: str) -> None:
    """Prefect does not accept them."""
    with pytest.raises(ConfigError, match="is not a valid work pool name"):
        check_pool_name(name)


@pytest.mark.long
def test_up_warns_of_other_pools_and_folders(client: SyncPrefectClient) -> None:
    """Its worker does not serve another pool, and runs use the deployments' working folder."""
    deploy(client, directory=Path.cwd())
    assert location_warnings(client, POOL) == []
    deploy(client)
    *pools, folder = location_warnings(client, "local")
    assert "train is in the work pool deployed" in pools[0]
    assert "/srv/runs" in folder
    assert len(pools) == len(deployments())


@pytest.mark.long
def test_a_worker_does_not_create_a_pool(prefect_server: PrefectServer, tmp_path: Path) -> None:
    """A mistyped pool name is an error that names the command to create the pool."""
    variables = prefect_server.environment
    done = trialflow(tmp_path, "worker", "--pool", "mistyped", variables=variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no work pool 'mistyped': create it with `trialflow deploy --pool" in done.stderr


@pytest.mark.long
def test_runs_without_a_process_are_requeued(client: SyncPrefectClient, tmp_path: Path) -> None:
    """A run that was Pending or Running when its worker and its process ended is scheduled again,
    unless crashed runs are not; one that has a process is not."""
    deploy(client)
    interrupted, lost, running = (create_run(client, tmp_path) for _ in range(3))
    set_state(client, interrupted, "Pending")
    set_state(client, lost, "Running")
    set_state(client, running, "Running")
    waits = "import sys; print('lives', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", waits, SUPERVISOR_MODULE],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PREFECT__FLOW_RUN_ID": str(running)},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline()
        assert requeue_lost_runs(client, "another") == []
        told = "\n".join(requeue_lost_runs(client, POOL))
        assert client.read_flow_run(running).state_name == "Running"
        process.communicate()
    for run in (interrupted, lost):
        found = client.read_flow_run(run)
        assert (found.state_name, found.next_scheduled_start_time is None) == (
            "AwaitingRetry", False,
        )  # fmt: skip
        assert found.name in told
    (restarts,) = client.read_automations_by_name(RESTART_CRASHED)
    client.pause_automation(restarts.id)
    (told,) = requeue_lost_runs(client, POOL)
    assert RESTART_CRASHED in told
    assert client.read_flow_run(running).state_name == "Crashed"


@pytest.mark.long
def test_the_gpu_limit_can_be_changed(client: SyncPrefectClient) -> None:
    """--gpus with another number changes the limit; without --gpus it is kept."""
    deploy(client)
    assert deploy(client, gpus=8)["concurrency limit gpu of 8"] == "changed"
    assert not any("gpu" in resource for resource in deploy(client, gpus=None))
    assert client.read_global_concurrency_limit_by_name("gpu").limit == 8


@pytest.mark.long
def test_an_existing_pool_is_kept(client: SyncPrefectClient) -> None:
    """Its template is replaced only with --overwrite, and --remove keeps it. Another type is an
    error."""
    deploy(client)
    template = client.read_work_pool(POOL).base_job_template
    update = WorkPoolUpdate(description="mine", base_job_template={})
    client.update_work_pool(POOL, update)
    assert deploy(client)[ALL[0]] == "unchanged"
    assert deploy(client, overwrite=True)[ALL[0]] == "changed"
    assert client.read_work_pool(POOL).base_job_template == template
    assert remove(client)[ALL[0]] == "kept"
    with pytest.raises(ConfigError, match=r"with type process, not docker: pass --type process"):
        list(set_up(wanted_resources("docker", POOL, None, None), client, False))
    client.delete_work_pool(POOL)


@pytest.mark.long
@pytest.mark.parametrize(
    "pool_type", [pytest.param("docker", marks=pytest.mark.long), "kubernetes"]
)
def test_pools_of_containers(client: SyncPrefectClient, pool_type: Any) -> None:
    """The server accepts their templates. Their deployments have no working folder, and no
    automation for lost starts."""
    resources = wanted_resources(pool_type, POOL, None, None)
    for verb in ("created", "unchanged"):
        assert {change.verb for change in set_up(resources, client, False)} == {verb}
    assert client.read_deployment_by_name("train/train").pull_steps == []
    assert client.read_automations_by_name(crash_lost_starts(POOL)) == []
    for _ in take_down(reversed(resources), client, False):
        pass


@pytest.mark.long
def test_a_run_that_crashes_too_often_fails(
    client: SyncPrefectClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Consecutive restarts count, by the automation or the supervisor, not Prefect's state Late; a
    retry by hand starts a new count."""
    deploy(client)
    run = create_run(client, tmp_path)
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", str(run))
    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", "one")

    def schedule(name: str, message: str | None, kind: str = "SCHEDULED") -> None:
        state = {"type": kind, "name": name, "message": message}
        body = {"state": state, "force": True}
        client.request("POST", f"/flow_runs/{run}/set_state", json=body)

    for _ in range(2):
        schedule("AwaitingRetry", SCHEDULED_AGAIN)
        schedule("Late", None)
    schedule("Pending", RESTARTED, "PENDING")
    check_crash_limit(3)
    with pytest.raises(CrashedTooOften, match="crashed 3 times in a row, and max_restarts is 2"):
        check_crash_limit(2)
    schedule("Scheduled", "Retried via CLI")
    check_crash_limit(0)


def test_leases_in_memory_are_a_warning(client: SyncPrefectClient) -> None:
    """A server with Prefect's default loses leases; the warning has the setting to change."""
    problem = lease_problem(client)
    assert problem is not None
    assert "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE=prefect.server" in problem


@pytest.mark.long
def test_the_commands_output(
    client: SyncPrefectClient, prefect_server: PrefectServer, tmp_path: Path
) -> None:
    """One line per resource, then the next step, unless the pool has a worker, and the warning of
    leases in memory. The present folder becomes the working folder."""
    variables = prefect_server.environment
    done = trialflow(tmp_path, "deploy", "--pool", POOL, "--gpus", "4", variables=variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[: len(ALL)] == [f"created: {each}" for each in ALL]
    assert done.stdout.endswith(f"trialflow worker --pool {POOL}\n")
    assert done.stderr.count("PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE") == 1
    assert str(tmp_path) in str(client.read_deployment_by_name("train/train").pull_steps)
    client.send_worker_heartbeat(POOL, "a worker")
    again = trialflow(tmp_path, "deploy", "--pool", POOL, "--gpus", "4", variables=variables)
    assert again.returncode == 0, again.stderr
    assert "start a worker" not in again.stdout


def test_an_experiment_is_run_on_a_schedule(
    client: SyncPrefectClient, prefect_server: PrefectServer, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """By the deployment of its flow, with the experiment; its file changes and removes it."""
    path = write_experiment(tmp_path)
    monkeypatch.chdir(tmp_path)

    def command(*arguments: str) -> str:
        with prefect_server.configured():
            code = main(["deploy", path.name, *arguments])
        said = capsys.readouterr()
        assert code == 0, said.err
        return said.out

    def schedules() -> list[tuple[Any, ...]]:
        found = client.read_deployment_by_name("train/train").schedules
        unit = "scheduling_unit"
        return [(each.slug, each.schedule, each.parameters["config"][unit]) for each in found]

    nightly = ("--pool", POOL, "--schedule", "0 2 * * *", "--timezone", "Europe/Berlin")
    title = "schedule of train/train (toy, 0 2 * * *, Europe/Berlin)"
    assert f"created: {title}" in command(*nightly)
    times = CronSchedule(cron="0 2 * * *", timezone="Europe/Berlin")
    assert schedules() == [("toy", times, 4)]
    write_experiment(tmp_path, scheduling_unit=2)
    assert f"changed: {title} (another experiment)" in command(*nightly)
    assert schedules() == [("toy", times, 2)]
    done = check_json(json.loads(command("--remove", "--json")))
    removed = {"verb": "removed", "resource": "schedule of train/train (toy)", "detail": ""}
    assert done == {"is_dry_run": False, "changes": [removed]}
    assert schedules() == []


@pytest.mark.parametrize(
    ("files", "arguments", "expected"),
    [
        ([], ("0 2 * * *", "UTC", None), "--schedule needs the experiment files"),
        (["a"], ("0 25 * * *", "UTC", None), "--schedule: cron: "),
        (["a"], ("0 0 31 2 *", "UTC", None), "--schedule: cron: .* has no future time"),
        (["a"], ("0 2 * * *", "Berlin", None), "--schedule: timezone: "),
        (["a"], ("0 2 * * *", "UTC", "search"), "a: `--flow search` does not run .*; train does"),
        (["a", "b"], ("0 2 * * *", "UTC", None), "b: another file has an experiment toy, too"),
    ],
)
def test_a_schedule_that_cannot_be(
    tmp_path: Path, files: list[str], arguments: Any, expected: str
) -> None:
    """It is refused before the server is asked."""
    with pytest.raises(ConfigError, match=expected):
        file_schedules({Path(each): toy_config(tmp_path) for each in files}, *arguments)


def test_experiments_of_like_names_have_their_own_schedules(tmp_path: Path) -> None:
    """Else one would take the other's place. A removal may name both, or one twice."""
    names = ("gpt-v1", "gpt_v1", "模型", "Модель")
    experiments = {Path(each): toy_config(tmp_path, name=each) for each in names}
    made = file_schedules(experiments, "0 2 * * *", "UTC", None)
    assert len({each._slug for each in made}) == len(names)
    twice = {Path(each): toy_config(tmp_path) for each in "ab"}
    assert len(file_schedules(twice, None, "UTC", None)) == 3


@pytest.mark.long
def test_without_a_configured_server(tmp_path: Path) -> None:
    """The error names the variable to set, and `trialflow up`."""
    done = trialflow(tmp_path, "deploy", variables={"PREFECT_API_URL": ""})
    assert done.returncode == 2
    assert "PREFECT_API_URL" in done.stderr
    assert "trialflow up" in done.stderr
