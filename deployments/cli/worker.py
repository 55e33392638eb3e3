"""`trialflow worker`: a Prefect process worker that saves its runs when it is stopped."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from trial_core.errors import ConfigError
from trialflow.deployments.cli import console
from trialflow.deployments.cli.deploy import DEFAULT_POOL, configured_client
from trialflow.deployments.cli.signals import Terminated, stoppable
from trialflow.deployments.cli.up import ServiceEnded, announce_stop


def worker(
    *options: Annotated[str, Parameter(allow_leading_hyphen=True)],
    pool: Annotated[str, Parameter(help="The work pool, of type process.")] = DEFAULT_POOL,
) -> int:
    """Run a Prefect worker on this machine that saves its runs when it is stopped.

    `prefect worker start` would kill them. Each saved run goes back into its queue, and the next
    worker resumes it. For systemd: KillMode=mixed, TimeoutStopSec=90.

    Parameters
    ----------
    options
        More options of `prefect worker start`: --limit 1, --name mine, --work-queue urgent.
        Default: none.
    """
    from prefect.settings import get_current_settings

    from trialflow.deployments.local_worker import LocalWorker
    from trialflow.flows.server.prefect_settings import use_stored_password

    use_stored_password()
    if not get_current_settings().api.url:
        raise ConfigError(
            "no Prefect server is configured: set PREFECT_API_URL to the server whose runs this "
            "machine executes, or run `trialflow up`, which starts a server on this machine"
        )
    _check_pool(pool)
    try:
        with stoppable(announce_stop), LocalWorker(pool, None, options) as running:
            running.serve()
    except KeyboardInterrupt:
        return console.INTERRUPTED
    except Terminated:
        return console.TERMINATED
    raise ServiceEnded("the worker ended unexpectedly")


def _check_pool(pool: str) -> None:
    """Refuse a missing pool: Prefect's worker would create it, with Prefect's job template.

    Raises:
        ConfigError: the work pool does not exist, or is not of type process.
    """
    from trialflow.deployments.desired_state import check_pool_name
    from trialflow.deployments.resources import find_pool

    check_pool_name(pool)
    with configured_client() as client:
        found = find_pool(client, pool)
    if found is None:
        raise ConfigError(
            f"there is no work pool {pool!r}: create it with `trialflow deploy --pool {pool}`"
        )
    if found.type != "process":
        raise ConfigError(
            f"work pool {pool!r} is of type {found.type}, not process: start its worker with "
            f"`prefect worker start --pool {pool}`"
        )
