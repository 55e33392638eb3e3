"""The Prefect API of a run: the configured server, that of `trialflow up`, or an embedded one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trialflow.flows.server.prefect_server import (
    PrefectServerError,
    PrefectServerProcess,
    restarting,
    using_server,
)
from trialflow.flows.server.prefect_settings import prepare_prefect
from trialflow.flows.server.server_login import ServerLogin, find_login
from trialflow.flows.server.single_instance import address_of_running

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

FLUSH_TIMEOUT_SECONDS = 30.0

# As in Prefect's ephemeral mode: a server that lives for one run leaves other deployments, work
# pools and runs in the same database alone.
SERVICES_OFF = {
    f"PREFECT_SERVER_SERVICES_{service}_ENABLED": "false"
    for service in (
        "CANCELLATION_CLEANUP",
        "CLEANUP_RECONCILER",
        "FOREMAN",
        "LATE_RUNS",
        "PAUSE_EXPIRATIONS",
        "REPOSSESSOR",
        "SCHEDULER",
    )
}


@dataclass(frozen=True)
class PrefectApi:
    """The Prefect API that flows of this process use.

    Attributes:
        ui_url: None if Prefect does not know it.
        server_log: of the embedded server; None if the user's own server is used.
        login: the login to a server that trialflow started, or None if the user has configured one.
    """

    api_url: str
    ui_url: str | None
    server_log: Path | None = None
    login: ServerLogin | None = None

    @property
    def is_embedded(self) -> bool:
        """True if the server ends with the run."""
        return self.server_log is not None

    @property
    def is_of_up(self) -> bool:
        """True if it is the server of a running `trialflow up`, found without configuration."""
        return self.login is not None and not self.is_embedded


@contextmanager
def prefect_api(
    waiting_for: Callable[[str], None] = lambda what: None, is_quiet: bool = True
) -> Iterator[PrefectApi]:
    """Provide a Prefect API for the flows of the block.

    The API is that of the configured server; else of the `trialflow up` that runs with this
    PREFECT_HOME; else of an embedded server.

    At the end of the block the database holds all logs and events of the runs. An embedded server
    that is killed is started again, and loses the records that it had received but not stored. For
    synchronous code; blocks may follow each other, but not overlap.

    Args:
        waiting_for: called with a text that tells the user which server is used or started.
        is_quiet: True if the terminal has a display of its own, in place of Prefect's log.

    Raises:
        PrefectServerError: the user's server does not answer, or the embedded one did not start.
    """
    prepare_prefect(is_quiet)
    from prefect.settings import get_current_settings

    with using_server_of_up(waiting_for) as login:
        settings = get_current_settings()
        if settings.api.url:
            whose = "server of `trialflow up`" if login else "configured Prefect server"
            waiting_for(f"connecting to the {whose}")
            if problem := configured_api_problem():
                raise PrefectServerError(problem)
            yield PrefectApi(settings.api.url, settings.ui_url, login=login)
            return
    log_path = settings.home / "trialflow-server.log"
    timeout_seconds = settings.server.ephemeral.startup_timeout_seconds
    waiting_for("starting a Prefect server for this run")
    with (
        PrefectServerProcess(log_path, timeout_seconds, settings=SERVICES_OFF) as server,
        restarting(server),
    ):
        try:
            yield PrefectApi(server.api_url, server.ui_url, log_path, server.login)
        finally:
            flush()


@contextmanager
def server() -> Iterator[PrefectApi]:
    """A Prefect server for a script's flows, as the command line uses it; see `prefect_api`.

    Use it for a block, ``with trialflow.server():``, or a function, ``@trialflow.server()``. It is
    the configured server, or that of `trialflow up`; else one that ends with the block. Unlike
    Prefect's temporary server, that one keeps every record and prints nothing on the terminal.
    """
    with prefect_api(is_quiet=False) as api:
        yield api


@contextmanager
def using_server_of_up(
    waiting_for: Callable[[str], object] = lambda what: None,
) -> Iterator[ServerLogin | None]:
    """Use the server of the `trialflow up` that runs with this PREFECT_HOME, for the block.

    Yields the login to it; None if none runs, or if another server is configured, which is then
    used. If `trialflow up` is starting, it calls `waiting_for` with a text, and waits.
    """
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    api_url = None if settings.api.url else address_of_running(settings.home, waiting_for)
    if api_url is None:
        yield None
        return
    login = find_login(settings.home, api_url)
    with using_server(api_url, login.password):
        yield login


def configured_api_problem() -> str | None:
    """Why the configured Prefect server cannot be used; None if it can, or none is configured."""
    from prefect.client.orchestration import get_client
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    api_url = settings.api.url
    if not api_url:
        return None
    with get_client(sync_client=True) as client:
        problem = client.api_healthcheck()
        if problem is None:
            problem = _version_error(client)
    if problem is None:
        return None
    if is_unauthorized(problem):
        return (
            f"the configured Prefect server {api_url} asks for another password: set"
            " PREFECT_API_AUTH_STRING to the one that `trialflow up` or the server's"
            " administrator names"
        )
    if isinstance(problem, ValueError):
        return (
            f"what answers at {api_url} is not the API of a Prefect server: set PREFECT_API_URL to"
            " its address, which ends with /api"
        )
    if address_of_running(settings.home) == api_url:
        return (
            f"the Prefect server of `trialflow up`, {api_url}, does not answer ({problem}). Wait"
            " until the machine is less busy, or stop `trialflow up` (Ctrl-C) and start it again"
        )
    return (
        f"the configured Prefect server {api_url} does not answer ({problem}). Start it"
        " (`prefect server start`), or unset PREFECT_API_URL (`prefect config unset"
        " PREFECT_API_URL` if a profile sets it): each run then starts its own server"
    )


def _version_error(client: SyncPrefectClient) -> Exception | None:
    """Return the error of a request that needs the password, which a health check does not."""
    import httpx

    try:
        client.api_version()
    except httpx.HTTPStatusError as error:
        return error if is_unauthorized(error) else None  # Prefect Cloud has no such route
    except (httpx.HTTPError, ValueError) as error:  # or no JSON, from another server
        return error
    return None


def is_unauthorized(error: Exception) -> bool:
    import httpx

    return (
        isinstance(error, httpx.HTTPStatusError)
        and error.response.status_code == httpx.codes.UNAUTHORIZED
    )


def flush() -> None:
    """Send the log lines and events that Prefect's background threads still hold.

    The threads end, and start again on their next use.
    """
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    EventsWorker.drain_all(timeout=FLUSH_TIMEOUT_SECONDS)
    APILogWorker.drain_all(timeout=FLUSH_TIMEOUT_SECONDS)
