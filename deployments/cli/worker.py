"""`trialflow worker`: Prefect's process worker, whose runs save when it is stopped."""

from __future__ import annotations

import time
from typing import Annotated

from cyclopts import Parameter

from trial_core.errors import ConfigError
from trialflow.deployments.cli import console
from trialflow.deployments.cli.deploy import DEFAULT_POOL, configured_client
from trialflow.deployments.cli.signals import Terminated, stoppable
from trialflow.deployments.cli.up import (
    POLL_SECONDS,
    STOP_RUNS_SECONDS,
    ServiceEnded,
    announce_stop,
)


def worker(
    *options: Annotated[str, Parameter(allow_leading_hyphen=True)],
    pool: Annotated[str, Parameter(help="The work pool, of type process.")] = DEFAULT_POOL,
) -> int:
    """Run a Prefect worker on this machine; stopped, its runs save first.

    As `prefect worker start`, which would kill them. Each run goes back into its queue, and the
    next worker goes on with it. For systemd: KillMode=mixed, TimeoutStopSec=90.

    Parameters
    ----------
    options
        More options of `prefect worker start`: --limit 1, --name mine, --work-queue urgent.
    """
    from prefect.settings import get_current_settings

    from trialflow.deployments.local_worker import LocalWorker

    if not get_current_settings().api.url:
        raise ConfigError(
            "no Prefect server is configured: set PREFECT_API_URL to the one whose runs this "
            "machine is to take, or use `trialflow up`, which starts one on this machine"
        )
    _refuse_wrong_pool(pool)
    try:
        with stoppable(announce_stop), LocalWorker(pool, None, options) as running:
            try:
                while not running.has_ended:
                    time.sleep(POLL_SECONDS)
            finally:
                if not running.has_ended:
                    running.stop_runs(STOP_RUNS_SECONDS)
    except KeyboardInterrupt:
        return console.INTERRUPTED
    except Terminated:
        return console.TERMINATED
    raise ServiceEnded("the worker has ended by itself")


def _refuse_wrong_pool(pool: str) -> None:
    """Prefect's worker would make a pool that is missing, with a job template of its own.

    Raises:
        ConfigError: there is no such work pool, or its runs are no processes.
    """
    from trialflow.deployments.desired_state import check_pool_name
    from trialflow.deployments.resources import find_pool

    check_pool_name(pool)
    with configured_client() as client:
        found = find_pool(client, pool)
    if found is None:
        raise ConfigError(f"no work pool {pool!r}: `trialflow deploy --pool {pool}` first")
    if found.type != "process":
        raise ConfigError(
            f"work pool {pool!r} is of type {found.type}, not process: its worker is "
            f"`prefect worker start --pool {pool}`"
        )
