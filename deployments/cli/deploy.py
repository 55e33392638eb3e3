"""`trialflow deploy`: set a Prefect server up for trialflow, again and again, or undo it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from trial_core.errors import ConfigError, TrialflowError
from trialflow.deployments.cli import console
from trialflow.deployments.cli.experiment_options import read_experiment

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

    from trialflow.deployments.desired_state import PoolType
    from trialflow.deployments.resources import Change, Resource
    from trialflow.deployments.retraining.requests import RetrainingRequest


DEFAULT_POOL = "local"


class ServerRefused(TrialflowError):
    """The Prefect server refused, or failed at, what it was asked."""


def deploy(
    *files: Path,
    type_: Annotated[
        Literal["process", "docker", "kubernetes"] | None,
        Parameter(
            name="--type",
            help="What runs are to be: process, docker or kubernetes. Default: what the work pool "
            "is; for a new one, process.",
        ),
    ] = None,
    pool: Annotated[
        str | None,
        Parameter(
            help="The work pool's name. Default: where the deployments are; at first, local."
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        Parameter(
            help="How many GPUs the server's runs share: each waits until it has its own. Not for "
            "Kubernetes, which counts them itself.",
            validator=Number(gte=1),
        ),
    ] = None,
    directory: Annotated[
        Path | None,
        Parameter(
            help="The working folder of runs, with trialflow-runs in it. Default: what is set "
            "already; at first this one, and for images their own."
        ),
    ] = None,
    overwrite: Annotated[
        bool, Parameter(help="Give a work pool that is there already trialflow's job template.")
    ] = False,
    remove: Annotated[bool, Parameter(help="Remove what this command has set up.")] = False,
    dry_run: Annotated[bool, Parameter(help="Say what would be done, and do nothing.")] = False,
) -> int:
    """Set the Prefect server that PREFECT_API_URL names up for trialflow; or undo it.

    A work pool with its job template, the deployments train, evaluate, prune and retrain, a limit
    on GPUs, and automations for runs that crash. What is there already is left alone, and so is
    what was changed in the UI: schedules, default parameters, job variables. Removing keeps what
    others have made, and the limit on GPUs unless --gpus is given.

    For each file with a `retraining` section there is a deployment of its model's own besides, with
    its schedule, and an automation if it is to run when data arrives. Given again, a file that has
    changed changes them. With --remove and files, only what is of these files goes.

    Parameters
    ----------
    files
        Experiment files (YAML) with a `retraining` section.
    """
    from trialflow.flows.server.prefect_settings import prepare_prefect

    prepare_prefect()
    from trialflow.deployments.flow_deployment import models_on_server
    from trialflow.deployments.resources import lease_problem, set_up, take_down
    from trialflow.deployments.retraining.model_resources import all_of

    retrainings = read_retrainings(files)
    with configured_client() as client:
        if remove and files:
            ours = list(all_of(each.model for each in retrainings))
            _print(take_down(reversed(ours), client, dry_run), dry_run)
            return 0
        pool_type, pool_name = resolve_pool(client, type_, pool)
        things = wanted_resources(
            pool_type,
            pool_name,
            gpus,
            directory,
            overwrite,
            remove,
            keeps_pool=pool is None,
            retrainings=retrainings,
            models=models_on_server(client),
        )
        if remove:
            _print(take_down(reversed(things), client, dry_run), dry_run)
            return 0
        _print(set_up(things, client, dry_run), dry_run)
        _print(remove_withdrawn(retrainings, client, dry_run), dry_run)
        # Whether GPUs are counted or not: limits of deployments have leases as well.
        if problem := lease_problem(client):
            console.warning(problem)
    if not dry_run:
        worker = "trialflow worker" if pool_type == "process" else "prefect worker start"
        print(f"\nstart a worker where the runs are to be: {worker} --pool {pool_name}")
    return 0


def resolve_pool(
    client: SyncPrefectClient, pool_type: PoolType | None, pool: str | None
) -> tuple[PoolType, str]:
    """Type and name of the work pool: as asked for, else as they are, else as they are at first.

    Raises:
        ConfigError: no work pool can have that name.
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
    """What the server should have, in the order in which it is made.

    Args:
        directory: the working folder of runs; None: that of a deployment that is there stays.
        keeps_pool: whether a deployment that is there stays in its work pool.
        retrainings: what files ask for.
        models: those whose retraining is on the server, by a file that need not be given again.
    """
    from trialflow.deployments.desired_state import DeploymentTarget, automations, deployments
    from trialflow.deployments.flow_deployment import FlowDeployment
    from trialflow.deployments.resources import FixedAutomation, GpuLimit, Pool
    from trialflow.deployments.retraining.model_resources import all_of, asked_for
    from trialflow.deployments.retraining.requests import template

    folder = directory or (Path.cwd() if pool_type == "process" else None)
    where = str(folder.absolute()) if folder else None
    place = DeploymentTarget(pool, where, keeps_pool, keeps_directory=directory is None)
    given = {each.model for each in retrainings}
    kept = [FlowDeployment(template(each), place) for each in models if each not in given]
    return [
        Pool(pool, pool_type, overwrite),
        *([GpuLimit(gpus)] if gpus or is_removal else []),
        *(FlowDeployment(each, place) for each in deployments()),
        *(FixedAutomation(each) for each in automations([pool] if pool_type == "process" else [])),
        *(all_of(models) if is_removal else kept),
        *asked_for(retrainings, place),
    ]


def read_retrainings(files: Sequence[Path]) -> list[RetrainingRequest]:
    """What the `retraining` sections of experiment files ask for.

    Raises:
        ConfigError: what is wrong in the first one that cannot be used.
    """
    from trialflow.deployments.retraining.requests import retrainings

    return retrainings({path: read_experiment(path, []) for path in files})


def remove_withdrawn(
    retrainings: Sequence[RetrainingRequest], client: SyncPrefectClient, dry_run: bool
) -> Iterator[Change]:
    """Remove what files have asked for before, and ask for no more."""
    from trialflow.deployments.resources import take_down
    from trialflow.deployments.retraining.model_resources import not_asked_for

    removed = take_down(not_asked_for(retrainings), client, dry_run)
    return (done for done in removed if done.verb != "not there")


@contextmanager
def configured_client() -> Iterator[SyncPrefectClient]:
    """A client of the Prefect server that the user has configured.

    Raises:
        ConfigError: there is none.
        PrefectServerError: it does not answer.
        ServerRefused: it does not do what it is asked.
    """
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.settings import get_current_settings

    from trialflow.flows.server.embedded import PrefectServerError, configured_api_problem

    if not get_current_settings().api.url:
        raise ConfigError(
            "no Prefect server is configured: set PREFECT_API_URL to the one that is to run "
            "trials, or use `trialflow up`, which starts one on this machine"
        )
    if problem := configured_api_problem():
        raise PrefectServerError(problem)
    with get_client(sync_client=True) as client:
        try:
            yield client
        except httpx.HTTPStatusError as error:
            raise ServerRefused(
                f"the Prefect server answered {error.request.method} {error.request.url} with "
                f"{error.response.status_code}: {error.response.text[:500]}"
            ) from error


def _print(done: Iterator[Change], dry_run: bool) -> None:
    for each in done:
        would = "would be " if dry_run and each.verb in ("created", "changed", "removed") else ""
        detail = f" ({each.detail})" if each.detail else ""
        print(f"{would}{each.verb}: {each.resource}{detail}", flush=True)
