"""`trialflow up`: all that a team of one needs on one machine, until Ctrl-C."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from trial_core import text_format
from trial_core.errors import ConfigError, TrialflowError
from trialflow.deployments.cli import console
from trialflow.deployments.cli.deploy import (
    DEFAULT_POOL,
    read_retrainings,
    remove_withdrawn,
    resolve_pool,
    wanted_resources,
)
from trialflow.deployments.cli.signals import Terminated, stoppable

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

    from trialflow.deployments.retraining.requests import RetrainingRequest
    from trialflow.flows.server.local_server import LocalServer

DEFAULT_PORT = 4200
POLL_SECONDS = 1.0
# What a run has to save, by default 25 s, and to start and end.
STOP_RUNS_SECONDS = 60.0


class ServiceEnded(TrialflowError):
    """The server or the worker that `trialflow up` started has ended by itself."""


def up(
    *files: Path,
    port: Annotated[
        int,
        Parameter(
            help="The port of the UI and the API; if it is taken, another one is used.",
            validator=Number(gte=0, lte=65535),
        ),
    ] = DEFAULT_PORT,
    pool: Annotated[
        str | None,
        Parameter(
            help="The work pool, of type process, to which the deployments then belong. Default: "
            "the one that they are in; at first, local."
        ),
    ] = None,
) -> int:
    """Run a Prefect server, a worker and trialflow's deployments on this machine.

    For a team of one: nothing else to start, and Ctrl-C stops it all. Runs that are under way save
    first, and go on with the next `trialflow up`. What was run is kept in Prefect's own database
    (PREFECT_HOME), where `prefect server start` shows it too.

    With experiment files that have a `retraining` section, their models are retrained as these say:
    by a schedule, or when data arrives. They need not be given again the next time.

    Parameters
    ----------
    files
        Experiment files (YAML) with a `retraining` section.
    """
    from trialflow.flows.server.prefect_settings import prepare_prefect

    prepare_prefect()
    from prefect.settings import get_current_settings

    from trialflow.deployments.desired_state import check_pool_name

    if pool is not None:
        check_pool_name(pool)
    retrainings = read_retrainings(files)
    settings = get_current_settings()
    if settings.api.url:
        raise ConfigError(
            f"Prefect is configured to use the server at {settings.api.url}: `trialflow up` starts "
            "one of its own. To use that one: `trialflow deploy`, then `trialflow worker`; "
            "else unset PREFECT_API_URL (`prefect config unset PREFECT_API_URL` when a profile "
            "sets it)"
        )
    try:
        with stoppable(announce_stop):
            limit_seconds = settings.server.ephemeral.startup_timeout_seconds
            _serve(port, pool, retrainings, settings.home, limit_seconds)
    except KeyboardInterrupt:
        return console.INTERRUPTED
    except Terminated:
        return console.TERMINATED
    return 0


def announce_stop(how: str) -> None:
    """Say what a signal leads to. Called in the signal handler."""
    # Not with print: the signal may have come in the middle of one.
    os.write(2, f"{how}: runs save, then all ends (again: at once)\n".encode())


def _serve(
    port: int,
    pool: str | None,
    retrainings: Sequence[RetrainingRequest],
    home: Path,
    start_limit_seconds: float,
) -> None:
    """Start all, and stay until a signal, or the end of one of them, ends it."""
    from trialflow.deployments.local_worker import LocalWorker
    from trialflow.deployments.single_instance import single_instance
    from trialflow.flows.server.local_server import LocalServer, log_tail

    print("starting Prefect…", flush=True)
    server_log, worker_log = home / "trialflow-server.log", home / "trialflow-worker.log"
    with single_instance(home) as say, LocalServer(port, server_log, start_limit_seconds) as server:
        say(server.api_url)
        served = _set_up(pool, retrainings)
        with LocalWorker(served, worker_log) as worker:
            print("\n".join(_welcome(server, port, worker_log)), flush=True)
            try:
                while not (server.has_ended or worker.has_ended):
                    time.sleep(POLL_SECONDS)
            finally:
                if not worker.has_ended:
                    worker.stop_runs(STOP_RUNS_SECONDS)
        ended, log = ("server", server_log) if server.has_ended else ("worker", worker_log)
        raise ServiceEnded(f"the {ended} has ended by itself, so all has; {log_tail(log)}")


def _set_up(asked_pool: str | None, retrainings: Sequence[RetrainingRequest]) -> str:
    """The work pool, whose name it is, the deployments and the rest; what is new is said."""
    from prefect.client.orchestration import get_client

    from trial_core.slots.accelerators import count_accelerators
    from trialflow.deployments.flow_deployment import models_on_server
    from trialflow.deployments.local_worker import requeue_interrupted_starts
    from trialflow.deployments.resources import set_up

    with get_client(sync_client=True) as client:
        pool_type, pool = resolve_pool(client, None, asked_pool)
        if asked_pool is None and pool_type != "process":
            pool = DEFAULT_POOL
        gpus = count_accelerators() or None
        things = wanted_resources(
            "process",
            pool,
            gpus,
            None,
            keeps_pool=asked_pool is None,
            retrainings=retrainings,
            models=models_on_server(client),
        )
        done_now = chain(
            set_up(things, client, False), remove_withdrawn(retrainings, client, False)
        )
        for done in done_now:
            if done.verb != "unchanged":
                print(f"{done.verb}: {done.resource}", flush=True)
        for problem in elsewhere(client, pool):
            console.warning(problem)
        if count := requeue_interrupted_starts(client, pool):
            again = "scheduled again, because their start was interrupted"
            print(f"{again}: {text_format.plural(count, 'run')}", flush=True)
    return pool


def elsewhere(client: SyncPrefectClient, pool: str) -> list[str]:
    """What is said of deployments whose runs are not where a newcomer would look for them."""
    from trialflow.deployments.flow_deployment import found_deployments, working_folder

    found = found_deployments(client)
    said = [
        f"the deployment {each.name} is in the work pool {each.work_pool_name}, from which this "
        f"worker takes no runs: to move it here, `trialflow up --pool {pool}`"
        for each in found
        if each.work_pool_name != pool
    ]
    here = str(Path.cwd())
    folders = {working_folder(each) for each in found} - {here, None}
    said += [
        f"runs are in the folder {folder}, where `trialflow up` was first started, not in {here}: "
        f"to change that, `trialflow deploy --directory {here}` while this runs"
        for folder in sorted(map(str, folders))
    ]
    return said


def _welcome(server: LocalServer, port: int, worker_log: Path) -> list[str]:
    taken = "" if port in (0, server.port) else f" (port {port} is taken)"
    return [
        "",
        f"UI       {server.ui_url}{taken}",
        f"logs     {server.log_path}",
        f"         {worker_log}",
        "",
        "in another terminal:",
        f"  export PREFECT_API_URL={server.api_url}",
        '  prefect deployment run train/train --params "$(trialflow config experiment.yaml)"',
        "",
        "Ctrl-C stops all; runs save first, and go on with the next `trialflow up`",
    ]
