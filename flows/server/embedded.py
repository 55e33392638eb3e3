"""A Prefect API for one run, where the user has configured none: `with prefect_api() as api: …`.

Prefect has such a server built in (its ephemeral mode). It is not used here because it

- outlives a driver that is killed;
- shares the driver's terminal: it prints there, and Ctrl-C reaches it before the run has ended;
- when stopped drops what it was still writing: of 100 quick task runs, 17 to 67 were recorded;
- serves no UI.

This one is the same application on the same database (PREFECT_HOME), so `prefect server start`
shows the run later; meanwhile its own UI shows it live.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trial_core.errors import TrialflowError
from trialflow.flows.server.prefect_settings import chosen_settings, environment, prepare_prefect

HOST = "127.0.0.1"
FLUSH_LIMIT_SECONDS = 30.0
STOP_LIMIT_SECONDS = 45.0
LOG_TAIL_BYTES = 4000

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


class PrefectServerError(TrialflowError):
    """No Prefect server: the configured one does not answer, or the embedded one did not start."""


@dataclass(frozen=True)
class PrefectApi:
    """The Prefect API that flows of this process talk to.

    Attributes:
        api_url: where the API is.
        ui_url: where its UI is; None when Prefect does not know.
        server_log: the log of the embedded server; None when the user's own server is used.
    """

    api_url: str
    ui_url: str | None
    server_log: Path | None = None

    @property
    def is_embedded(self) -> bool:
        """Whether the API ends with the block that opened it."""
        return self.server_log is not None


@contextmanager
def prefect_api(server_log: Path | None = None) -> Iterator[PrefectApi]:
    """Have a Prefect API for the flows run inside the block: the user's, else an embedded one.

    At the end of the block all that the runs logged and emitted has been written to the database,
    and the embedded server is gone. It goes too, within 10 s, when this process is killed. For
    synchronous code; the block may be entered again, one at a time.

    Args:
        server_log: where the embedded server's log goes (appended); default in PREFECT_HOME.

    Raises:
        PrefectServerError: the user's server cannot be reached; or the embedded one ended, or did
            not answer in time.
    """
    prepare_prefect()
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    if settings.api.url:
        if problem := configured_api_problem():
            raise PrefectServerError(problem)
        yield PrefectApi(settings.api.url, settings.ui_url)
        return
    with _embedded_api(
        server_log or settings.home / "trialflow-server.log",
        settings.server.ephemeral.startup_timeout_seconds,
    ) as api:
        yield api


@contextmanager
def _embedded_api(log_path: Path, start_limit_seconds: float) -> Iterator[PrefectApi]:
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with socket.create_server((HOST, 0)) as listener:
        root_url = f"http://{HOST}:{listener.getsockname()[1]}"
        process = _start(listener, f"{root_url}/api", log_path)
    api = PrefectApi(f"{root_url}/api", root_url, log_path)
    variables = {"PREFECT_API_URL": api.api_url, "PREFECT_UI_URL": root_url, **_without_proxy()}
    try:
        with environment(variables):
            _wait_until_it_answers(process, api.api_url, start_limit_seconds, log_path)
            try:
                yield api
            finally:
                flush()
    finally:
        _stop(process)


def configured_api_problem() -> str | None:
    """Why the Prefect server that the user has configured cannot be used; None when it can.

    None as well when none is configured, since runs then bring their own.
    """
    from prefect.client.orchestration import get_client
    from prefect.settings import get_current_settings

    api_url = get_current_settings().api.url
    if not api_url:
        return None
    with get_client(sync_client=True) as client:
        problem = client.api_healthcheck()
    if problem is None:
        return None
    return (
        f"Prefect is configured to use the server at {api_url}, which does not answer"
        f" ({problem}). Start it (`prefect server start`), or unset PREFECT_API_URL"
        " (`prefect config unset PREFECT_API_URL` when a profile sets it) and runs bring their own"
    )


def _start(listener: socket.socket, api_url: str, log_path: Path) -> subprocess.Popen[bytes]:
    """Start the server on a socket that listens already: no port to lose, no polling for it.

    A session of its own keeps the terminal's Ctrl-C away from it.
    """
    variables = {
        **SERVICES_OFF,
        **os.environ,
        **chosen_settings(),
        # Its stderr is a file: nothing to be quiet for.
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "DEBUG",
        "PREFECT_LOGGING_HANDLERS_DEBUG_LEVEL": "DEBUG",
        "PREFECT_UI_API_URL": api_url,
    }
    with log_path.open("ab") as log:
        return subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("server_process.py")),
                str(listener.fileno()),
                str(os.getpid()),
            ],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[listener.fileno()],
            start_new_session=True,
            env=variables,
        )


def _without_proxy() -> dict[str, str]:
    """Variables that keep requests to the embedded server out of a configured HTTP proxy."""
    return {
        name: ",".join(filter(None, [os.environ.get(name), HOST]))
        for name in ("no_proxy", "NO_PROXY")
    }


def _wait_until_it_answers(
    process: subprocess.Popen[bytes], api_url: str, limit_seconds: float, log_path: Path
) -> None:
    import httpx

    try:
        # The connection is accepted at once, the answer comes when the server is ready.
        httpx.get(f"{api_url}/health", timeout=limit_seconds).raise_for_status()
    except httpx.TimeoutException:
        process.kill()
        raise PrefectServerError(
            f"Prefect's embedded server did not answer {api_url}/health within"
            f" {limit_seconds} s. Give it longer with"
            f" PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS; {_log_tail(log_path)}"
        ) from None
    except httpx.HTTPError as error:
        _stop(process)
        raise PrefectServerError(
            f"Prefect's embedded server ended with exit code {process.returncode} while it was"
            f" starting ({error}); {_log_tail(log_path)}"
        ) from None


def _log_tail(log_path: Path) -> str:
    with log_path.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
        tail = log.read().decode(errors="replace").strip()
    return f"its log {log_path} ends with:\n{tail}" if tail else f"its log: {log_path}"


def flush() -> None:
    """Send what Prefect's background threads still hold: log lines, and task runs as events.

    They are closed by it, and open again, for another address if need be, on the next use.
    """
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    EventsWorker.drain_all(timeout=FLUSH_LIMIT_SECONDS)
    APILogWorker.drain_all(timeout=FLUSH_LIMIT_SECONDS)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server: its standard input ends, it writes what it has, it goes."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(STOP_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
