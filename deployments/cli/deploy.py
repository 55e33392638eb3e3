"""`trialflow deploy`: set up a Prefect server for trialflow, update it, or undo it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from trial_core.errors import ConfigError, TrialflowError
from trialflow.deployments.cli import console
from trialflow.deployments.cli.experiment_options import read_any_experiment, read_retraining
from trialflow.deployments.cli.json_output import AsJson, print_json
from trialflow.deployments.cli.waiting import print_above_the_wait, waiting

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

    from trial_core.config import ExperimentConfig
    from trialflow.deployments.desired_state import PoolType
    from trialflow.deployments.resources import Change, Resource
    from trialflow.deployments.retraining import RetrainingRequest
    from trialflow.deployments.schedules import FileSchedule


DEFAULT_POOL = "local"


class ServerRefused(TrialflowError):
    """The Prefect server answered a request with an error."""


@Parameter(name="*")
@dataclass(frozen=True)
class Target:
    """The place where runs are started, and the resources that they share there.

    Attributes:
        type_: The work pool's type: process, docker or kubernetes. Default: the existing pool's
            type; process for a new pool.
        pool: The work pool's name. Default: the pool of the existing deployments, or local.
        gpus: How many GPUs the server's runs share: each run waits until its GPUs are free. Not for
            Kubernetes, which counts GPUs itself. Default: the server's present limit, or none.
        directory: The working folder of runs, which contains trialflow-runs. Default: the folder of
            the existing deployments, or this one; in an image, the image's.
        overwrite: Replace an existing work pool's job template with trialflow's.
    """

    type_: Annotated[
        Literal["process", "docker", "kubernetes"] | None, Parameter(name="--type")
    ] = None
    pool: str | None = None
    gpus: Annotated[int | None, Parameter(validator=Number(gte=1))] = None
    directory: Path | None = None
    overwrite: bool = False


def deploy(
    *files: Path,
    schedule: str | None = None,
    timezone: str | None = None,
    flow: Literal["train", "evaluate", "search"] | None = None,
    target: Target | None = None,
    remove: bool = False,
    dry_run: bool = False,
    json_: AsJson = False,
) -> None:
    """Set up the Prefect server at PREFECT_API_URL for trialflow, or undo it.

    If that is not set: the server of a running `trialflow up`.

    Creates a work pool with its job template, the deployments train, evaluate, search, prune and
    retrain, a GPU limit, and automations for crashed runs. Existing objects are updated, but
    changes made in the UI stay: schedules, default parameters, job variables. --remove keeps
    others' objects, and keeps the GPU limit unless --gpus is passed.

    With --schedule, each file's experiment is run at these times: the deployment of --flow gets a
    schedule with the experiment, by its name. Without it, for each file with a `retraining`
    section, also creates a deployment for its model, with its schedule, and an automation if it
    runs when data arrives. Pass a changed file again to update them. With --remove and files, only
    the objects of these files are removed.

    Args:
        files: Experiment files (YAML); without --schedule each needs a `retraining` section.
            Default: none.
        schedule: When to run the files' experiments, as a cron line: "0 2 * * *". Default: no
            schedule.
        timezone: The time zone of --schedule, such as Europe/Berlin. Default: UTC.
        flow: What --schedule runs. Default: search for an experiment that searches, else train.
        remove: Remove what this command has created.
        dry_run: Print the changes without making them.
    """
    from trialflow.flows.server.prefect_settings import prepare_prefect

    prepare_prefect()
    from trialflow.deployments.flow_deployment import models_on_server
    from trialflow.deployments.resources import lease_problem, set_up, take_down
    from trialflow.deployments.retraining import all_resources, retraining_requests

    if remove and schedule is not None:
        raise ConfigError("--remove removes schedules as well: leave out --schedule")
    if flow is not None and schedule is None and not (remove and files):
        raise ConfigError("--flow says what --schedule runs: add that, or leave out --flow")
    if timezone is not None and schedule is None:
        raise ConfigError("--timezone is that of --schedule: add that, or leave out --timezone")
    target = target or Target()
    schedules: list[FileSchedule] = []
    if remove or schedule is not None:
        experiments = {path: read_any_experiment(path) for path in files}
        schedules = file_schedules(experiments, schedule, timezone or "UTC", flow)
        retrained = {path: each for path, each in experiments.items() if remove and each.retraining}
        retrainings = retraining_requests(retrained)
    else:
        retrainings = read_retrainings(files)
    with configured_client() as client:
        if remove and files:  # only the objects of the files
            known = [each for each in schedules if each.look(client)[0]]
            of_files = [*all_resources(each.model for each in retrainings), *known]
            changes = take_down(reversed(of_files or schedules), client, dry_run)
            _print(changes, dry_run, json_)
            return
        pool_type, pool = resolve_pool(client, target.type_, target.pool)
        resources = wanted_resources(
            pool_type,
            pool,
            target.gpus,
            target.directory,
            target.overwrite,
            is_removal=remove,
            keeps_pool=target.pool is None,
            retrainings=retrainings,
            models=models_on_server(client),
        )
        if remove:
            _print(take_down(reversed(resources), client, dry_run), dry_run, json_)
            return
        made = set_up([*resources, *schedules], client, dry_run)
        withdrawn = remove_withdrawn(retrainings, client, dry_run)
        _print(chain(made, withdrawn), dry_run, json_)
        # Also without a GPU limit: concurrency limits of deployments have leases too.
        if problem := lease_problem(client):
            console.warning(problem)
        waits_for_worker = not (dry_run or json_) and _has_no_worker(client, pool)
    if waits_for_worker:
        worker = "trialflow worker" if pool_type == "process" else "prefect worker start"
        print(f"\nstart a worker on the machine that trains: {worker} --pool {pool}")


def _has_no_worker(client: SyncPrefectClient, pool: str) -> bool:
    from prefect.client.schemas.objects import WorkPoolStatus

    return client.read_work_pool(pool).status is WorkPoolStatus.NOT_READY


def resolve_pool(
    client: SyncPrefectClient, pool_type: PoolType | None, pool: str | None
) -> tuple[PoolType, str]:
    """Return type and name of the work pool: as given, else of existing deployments, else default.

    Raises:
        ConfigError: `pool` is not a valid name.
    """
    from trialflow.deployments.desired_state import check_pool_name
    from trialflow.deployments.flow_deployment import found_deployments
    from trialflow.deployments.resources import find_pool

    if pool is None:
        used = [each.work_pool_name for each in found_deployments(client) if each.work_pool_name]
        pool = used[0] if used else DEFAULT_POOL
    check_pool_name(pool)
    if pool_type is None:
        found = find_pool(client, pool)
        types: dict[str, PoolType] = {"docker": "docker", "kubernetes": "kubernetes"}
        pool_type = types.get(found.type, "process") if found is not None else "process"
    return pool_type, pool


def wanted_resources(
    pool_type: PoolType,
    pool: str,
    gpus: int | None,
    directory: Path | None,
    overwrite: bool = False,
    is_removal: bool = False,
    keeps_pool: bool = False,
    retrainings: Sequence[RetrainingRequest] = (),
    models: Sequence[str] = (),
) -> list[Resource]:
    """Return the resources that the server should have, in the order of creation.

    Args:
        directory: the working folder of runs; None if existing deployments keep theirs.
        keeps_pool: True if existing deployments keep their work pool.
        retrainings: the requests of the files.
        models: models with a deployment on the server, which their files need not request again.
    """
    from trialflow.deployments.automations import automations
    from trialflow.deployments.desired_state import DeploymentTarget, base_deployment, deployments
    from trialflow.deployments.flow_deployment import FlowDeployment
    from trialflow.deployments.resources import GpuLimit, Pool, fixed_automation
    from trialflow.deployments.retraining import all_resources, requested_resources

    folder = directory or (Path.cwd() if pool_type == "process" else None)
    where = str(folder.absolute()) if folder else None
    target = DeploymentTarget(pool, where, keeps_pool, keeps_directory=directory is None)
    given = {each.model for each in retrainings}
    kept = [FlowDeployment(base_deployment(each), target) for each in models if each not in given]
    return [
        Pool(pool, pool_type, overwrite),
        *([GpuLimit(gpus)] if gpus or is_removal else []),
        *(FlowDeployment(each, target) for each in deployments()),
        *(fixed_automation(each) for each in automations([pool] if pool_type == "process" else [])),
        *(all_resources(models) if is_removal else kept),
        *requested_resources(retrainings, target),
    ]


def read_retrainings(files: Sequence[Path]) -> list[RetrainingRequest]:
    """Read the `retraining` sections of experiment files.

    Raises:
        ConfigError: a file is invalid, or has no such section.
    """
    from trialflow.deployments.retraining import retraining_requests

    return retraining_requests({path: read_retraining(path) for path in files})


def file_schedules(
    experiments: Mapping[Path, ExperimentConfig], cron: str | None, zone: str, flow: str | None
) -> list[FileSchedule]:
    """Return the schedules of experiment files; without `cron` those to remove, of each flow.

    Raises:
        ConfigError: no file is named, two have experiments of one name, the cron line is not valid,
            or the flow cannot run an experiment.
    """
    from trial_core.common.text_format import unique_slug
    from trial_core.search.settings import SearchExperiment
    from trialflow.deployments.schedules import FileSchedule, cron_schedule

    times = None if cron is None else cron_schedule(cron, zone, "--schedule: ")
    if times is not None and not experiments:
        raise ConfigError("--schedule needs the experiment files that are to be run")
    found: dict[tuple[str, str], FileSchedule] = {}
    for path, experiment in experiments.items():
        own = "search" if isinstance(experiment, SearchExperiment) else "train"
        runs = ("train", "evaluate") if own == "train" else ("search",)
        if times is not None and flow not in (None, *runs):
            raise ConfigError(f"{path}: `--flow {flow}` does not run this experiment; {own} does")
        for each in [flow or own] if times else [flow] if flow else ["train", "evaluate", "search"]:
            given = None if times is None else {"config": experiment.model_dump(mode="json")}
            key = f"{each}/{each}", unique_slug(experiment.name)
            if times is not None and key in found:
                raise ConfigError(f"{path}: another file has an experiment {experiment.name}, too")
            found[key] = FileSchedule(*key, times, given, experiment.name)
    return [*found.values()]


def remove_withdrawn(
    retrainings: Sequence[RetrainingRequest], client: SyncPrefectClient, dry_run: bool
) -> Iterator[Change]:
    """Remove resources that the files requested earlier and no longer request."""
    from trialflow.deployments.resources import take_down
    from trialflow.deployments.retraining import unrequested_resources

    removed = take_down(unrequested_resources(retrainings), client, dry_run)
    return (change for change in removed if change.verb != "not found")


@contextmanager
def configured_client() -> Iterator[SyncPrefectClient]:
    """A client of the configured Prefect server, else of that of the running `trialflow up`.

    Raises:
        ConfigError: no server is configured, and `trialflow up` does not run.
        PrefectServerError: the server does not answer, or does not answer any more.
        ServerRefused: the server answered a request of the block with an error.
    """
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.settings import get_current_settings

    from trialflow.flows.server.embedded_server import configured_api_problem, using_server_of_up
    from trialflow.flows.server.prefect_server import PrefectServerError

    with using_server_of_up(console.note):
        if not get_current_settings().api.url:
            raise ConfigError(
                "no Prefect server is configured: set PREFECT_API_URL to the server that runs "
                "trials, or run `trialflow up`, which starts a server on this machine"
            )
        with waiting("asking the Prefect server"):
            problem = configured_api_problem()
        if problem:
            raise PrefectServerError(problem)
        try:
            with get_client(sync_client=True) as client:
                yield client
        except httpx.HTTPStatusError as error:
            raise ServerRefused(
                f"the Prefect server answered {error.request.method} {error.request.url} with "
                f"{error.response.status_code}: {error.response.text[:500]}"
            ) from error
        except httpx.RequestError as error:  # it has answered a moment ago
            raise PrefectServerError(
                f"the Prefect server at {get_current_settings().api.url} does not answer any more "
                f"({type(error).__name__}: {error}). Try again"
            ) from error


def _print(changes: Iterator[Change], dry_run: bool, as_json: bool) -> None:
    with waiting("asking the Prefect server"):
        if as_json:
            made = [asdict(each) for each in changes]
            print_json("deploy", {"is_dry_run": dry_run, "changes": made})
            return
        for each in changes:
            is_change = each.verb in ("created", "changed", "removed")
            would = "would be " if dry_run and is_change else ""
            detail = f" ({each.detail})" if each.detail else ""
            print_above_the_wait(f"{would}{each.verb}: {each.resource}{detail}")
