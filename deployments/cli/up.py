"""`trialflow up`: a Prefect server, a worker and trialflow's deployments on one machine.

`trialflow worker`: a worker alone, which saves its runs when it is stopped.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from trial_core.errors import ConfigError, LaunchError
from trialflow.deployments.cli import console
from trialflow.deployments.cli.deploy import (
    DEFAULT_POOL,
    configured_client,
    read_retrainings,
    remove_withdrawn,
    resolve_pool,
    wanted_resources,
)
from trialflow.deployments.cli.json_output import AsJson, print_json, stdout_for_json
from trialflow.deployments.cli.signals import Terminated, stoppable
from trialflow.deployments.cli.waiting import print_above_the_wait, waiting, waiting_at_end

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

    from trialflow.deployments.retraining import RetrainingRequest
    from trialflow.flows.server.prefect_server import PrefectServerProcess

DEFAULT_PORT = 4200
RUNS_SAVE = "waiting for the runs, which save and end"


def up(
    *files: Path,
    port: Annotated[int, Parameter(validator=Number(gte=0, lte=65535))] = DEFAULT_PORT,
    pool: str | None = None,
    json_: AsJson = False,
) -> int:
    """Run a Prefect server, a worker and trialflow's deployments on this machine.

    Ctrl-C stops all of them. Training runs save first, and the next `trialflow up` resumes them.
    All records are in Prefect's database (PREFECT_HOME), where `prefect server start` shows them
    too.

    For each file with a `retraining` section, its model is retrained by its schedule or when data
    arrives. The next `trialflow up` keeps these deployments; the files need not be passed again.

    Args:
        files: Experiment files (YAML) with a `retraining` section. Default: none.
        port: The port of the UI and the API; any free port if it is taken.
        pool: The work pool, of type process, to move the deployments to. Default: the pool of the
            existing deployments, or local.
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
            f"Prefect is configured to use the server at {settings.api.url}, but `trialflow up` "
            "starts its own. To use the configured server, run `trialflow deploy` and `trialflow "
            "worker`. To start a server here, unset PREFECT_API_URL (`prefect config unset "
            "PREFECT_API_URL` if a profile sets it)"
        )
    try:
        with stoppable(announce_stop):
            timeout_seconds = settings.server.ephemeral.startup_timeout_seconds
            _serve(port, pool, retrainings, settings.home, timeout_seconds, json_)
    except KeyboardInterrupt:
        return console.INTERRUPTED
    except Terminated:
        return console.TERMINATED
    return 0


def announce_stop(signal_name: str) -> None:
    """Announce the effect of a signal. Called in the signal handler."""
    # Not with print, which the signal may have interrupted.
    text = f"{signal_name}: stopping; runs save first (send it again to end at once)\n"
    with suppress(OSError):  # a terminal that was closed
        os.write(2, text.encode())


def _serve(
    port: int,
    pool: str | None,
    retrainings: Sequence[RetrainingRequest],
    home: Path,
    start_timeout_seconds: float,
    as_json: bool,
) -> None:
    """Start the server and the worker, and keep them until a signal comes.

    A server or a worker that ends is started again; runs continue meanwhile.

    Raises:
        WorkerEnded: the worker ended too often.
        KeyboardInterrupt, Terminated: a signal came.
    """
    from trialflow.deployments.local_worker import LocalWorker
    from trialflow.flows.server.prefect_server import local_server, restarting
    from trialflow.flows.server.single_instance import single_instance

    say = console.note if as_json else partial(print, flush=True)
    say("starting Prefect…")
    server_log, worker_log = home / "trialflow-server.log", home / "trialflow-worker.log"
    with ExitStack() as until_the_end:
        store_address = until_the_end.enter_context(single_instance(home))
        with waiting("starting the Prefect server"):
            server = until_the_end.enter_context(
                waiting_at_end(
                    local_server(port, server_log, start_timeout_seconds),
                    "waiting for the Prefect server, which stores its records and ends",
                )
            )
        until_the_end.enter_context(restarting(server))
        store_address(f"{server.api_url} (password: in {server.login.path})")
        with stdout_for_json(as_json):
            pool_name = _set_up(pool, retrainings)
        with waiting_at_end(LocalWorker(pool_name, worker_log), RUNS_SAVE) as worker:
            if as_json:
                where = {"api_url": server.api_url, "ui_url": server.ui_url, "pool": pool_name}
                logs = {"server_log": str(server.log_path), "worker_log": str(worker_log)}
                print_json("up", {**where, "password_file": str(server.login.path), **logs})
            else:
                print("\n".join(_instructions(server, port, worker_log)), flush=True)
            worker.serve(partial(_report_end, pool_name))


def _report_end(pool: str, how: str) -> None:
    """Say how the worker has ended, and schedule those of its runs again that ended with it."""
    from prefect.client.orchestration import get_client

    from trialflow.deployments.local_worker import requeue_lost_runs
    from trialflow.tasks.client_retries import NO_ANSWER

    console.warning(how)
    try:
        with get_client(sync_client=True) as client:
            for sentence in requeue_lost_runs(client, pool):
                console.note(sentence)
    except NO_ANSWER as error:
        console.warning(f"the server was not asked for runs without a process: {error}")


def _set_up(requested_pool: str | None, retrainings: Sequence[RetrainingRequest]) -> str:
    """Create missing resources on the server, print the changes, and return the pool's name."""
    from prefect.client.orchestration import get_client

    from trialflow.deployments.flow_deployment import models_on_server
    from trialflow.deployments.local_worker import requeue_lost_runs
    from trialflow.deployments.resources import set_up

    with get_client(sync_client=True) as client:
        pool_type, pool = resolve_pool(client, None, requested_pool)
        if requested_pool is None and pool_type != "process":
            pool = DEFAULT_POOL
        resources = wanted_resources(
            "process",
            pool,
            _accelerators() or None,
            None,
            keeps_pool=requested_pool is None,
            retrainings=retrainings,
            models=models_on_server(client),
        )
        changes = set_up(resources, client, False)
        with waiting("setting up the Prefect server"):
            for change in chain(changes, remove_withdrawn(retrainings, client, False)):
                if change.verb != "unchanged":
                    print_above_the_wait(f"{change.verb}: {change.resource}")
        for warning in location_warnings(client, pool):
            console.warning(warning)
        for sentence in requeue_lost_runs(client, pool):
            print(sentence, flush=True)
    return pool


def _accelerators() -> int:
    """Return how many GPUs runs can share, or 0 if that is unknown: runs may still use the CPU."""
    from trial_core.processes.machine.accelerators import count_accelerators

    try:
        return count_accelerators()
    except LaunchError as error:
        console.warning(f"{error}. Without a count, runs do not share accelerators")
        return 0


def location_warnings(client: SyncPrefectClient, pool: str) -> list[str]:
    """Return warnings for deployments in another work pool, or with another working folder."""
    from trialflow.deployments.flow_deployment import found_deployments, working_folder

    found = found_deployments(client)
    warnings = [
        f"the deployment {each.name} is in the work pool {each.work_pool_name}, which this worker "
        f"does not serve: move it with `trialflow up --pool {pool}`"
        for each in found
        if each.work_pool_name != pool
    ]
    here = str(Path.cwd())
    folders = {working_folder(each) for each in found} - {here, None}
    warnings += [
        f"the working folder of runs is {folder}, from an earlier `trialflow up` or `deploy`, not "
        f"{here}: change it with `trialflow deploy --directory {here}` while this command runs"
        for folder in sorted(map(str, folders))
    ]
    return warnings


def _instructions(server: PrefectServerProcess, port: int, worker_log: Path) -> list[str]:
    taken = "" if port in (0, server.port) else f" (port {port} is taken)"
    # Others may read a log file: only a terminal shows the link that logs in.
    page = server.login.link(server.ui_url) if sys.stdout.isatty() else server.ui_url
    return [
        "",
        f"UI        {page}{taken}",
        f"password  {server.login.path}",
        f"logs      {server.log_path}",
        f"          {worker_log}",
        "",
        "to start a run, in another terminal (one command; copy all its lines):",
        f"  PREFECT_API_URL={server.api_url} \\",
        f'  PREFECT_API_AUTH_STRING="$(cat {shlex.quote(str(server.login.path))})" \\',
        '  prefect deployment run train/train --params "$(trialflow config experiment.yaml)"',
        "",
        "Ctrl-C stops everything; runs save first, and the next `trialflow up` resumes them",
    ]


def worker(
    *options: Annotated[str, Parameter(allow_leading_hyphen=True)],
    pool: str = DEFAULT_POOL,
    json_: AsJson = False,
) -> int:
    """Run a Prefect worker on this machine that saves its runs when it is stopped.

    `prefect worker start` would kill them. Each saved run goes back into its queue, and the next
    worker resumes it. For systemd: KillMode=mixed, TimeoutStopSec=90.

    Args:
        options: More options of `prefect worker start`: --limit 1, --name mine, --work-queue
            urgent. Default: none.
        pool: The work pool, of type process.
    """
    from prefect.settings import get_current_settings

    from trialflow.deployments.desired_state import check_pool_name
    from trialflow.deployments.local_worker import LocalWorker
    from trialflow.deployments.resources import find_pool
    from trialflow.flows.server.prefect_settings import use_stored_password

    use_stored_password()
    if not get_current_settings().api.url:
        raise ConfigError(
            "no Prefect server is configured: set PREFECT_API_URL to the server whose runs this "
            "machine executes, or run `trialflow up`, which starts a server on this machine"
        )
    check_pool_name(pool)
    with configured_client() as client:
        found = find_pool(client, pool)
    if found is None:  # Prefect's worker would create it, with Prefect's job template
        raise ConfigError(
            f"there is no work pool {pool!r}: create it with `trialflow deploy --pool {pool}`"
        )
    if found.type != "process":
        raise ConfigError(
            f"work pool {pool!r} is of type {found.type}, not process: start its worker with "
            f"`prefect worker start --pool {pool}`"
        )
    try:
        with (
            stdout_for_json(json_),
            stoppable(announce_stop),
            waiting_at_end(LocalWorker(pool, None, options), RUNS_SAVE) as running,
        ):
            running.serve(console.warning)
    except KeyboardInterrupt:
        stop, code = "Ctrl-C", console.INTERRUPTED
    except Terminated:
        stop, code = "SIGTERM", console.TERMINATED
    if json_:
        print_json("worker", {"pool": pool, "stopped_by": stop})
    return code
