"""A Prefect server that lives as long as a block of this process, and is started again if killed.

Prefect has a built-in server for this (its ephemeral mode). It is not used here because it

- outlives a driver that is killed;
- shares the driver's terminal: it prints there, and Ctrl-C stops it before the run has ended;
- loses unwritten records when it stops: of 100 quick task runs, 17 to 67 were recorded;
- serves no UI.

This server is the same application on the same database (PREFECT_HOME), so `prefect server start`
shows the runs later.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from multiprocessing.connection import wait
from pathlib import Path

from trial_core.errors import TrialflowError
from trial_core.processes.machine.child import Child, log_tail
from trialflow.flows.server.prefect_settings import chosen_settings, environment
from trialflow.flows.server.server_login import HOST, ServerLogin, new_password, password_path

START_POLL_SECONDS = 0.1
STOP_TIMEOUT_SECONDS = 45.0
RESTART_POLL_SECONDS = 0.5
# A server that lived this long is started again at once. The pause before others is doubled.
HEALTHY_SECONDS = 60.0
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 60.0
SCRIPT = str(Path(__file__).with_name("server_script.py"))
# On this terminal Prefect may be quiet. In a child, the levels of its loggers alone decide.
LOG_EVERYTHING = dict.fromkeys(
    ("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "PREFECT_LOGGING_HANDLERS_DEBUG_LEVEL"), "DEBUG"
)
PERSISTENT_LEASE_STORAGE = "prefect.server.concurrency.lease_storage.filesystem"
SETTINGS_OF_UP = {
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": PERSISTENT_LEASE_STORAGE,
    # How long no server may have run (ISO 8601). By default Prefect drops automation triggers that
    # came due more than a minute before the start: runs lost with the last server would stay lost.
    "PREFECT_SERVER_EVENTS_EXPIRED_BUCKET_BUFFER": "P30D",
    # How soon the server notices a crashed run; by default up to 5 s later.
    "PREFECT_SERVER_EVENTS_PROACTIVE_GRANULARITY": "PT1S",
}


class PrefectServerError(TrialflowError):
    """The configured Prefect server does not answer, or our own did not start."""


class PrefectServerProcess:
    """Prefect's API and UI on this machine, used by this process. A context manager.

    The server ends with the block. It also ends, within 10 s, when this process is killed. This
    process holds the port until the server has ended, also while it is started again.

    Args:
        port: the port to listen on; if it is 0 or taken, any free one.
        settings: Prefect settings of the server, as environment variables. The user's own
            settings override them.

    Attributes:
        port, api_url, ui_url: where the server listens, once the block is entered.
        login: how this user's commands and browser log in.
    """

    port: int
    api_url: str
    ui_url: str
    login: ServerLogin
    _listener: socket.socket

    def __init__(
        self,
        log_path: Path,
        start_timeout_seconds: float,
        port: int = 0,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.log_path = log_path
        self._start_timeout_seconds = start_timeout_seconds
        self._wanted_port = port
        self._settings = settings or {}
        self._process: Child | None = None
        self._on_exit = ExitStack()

    def __enter__(self) -> PrefectServerProcess:
        """Start the server, wait until it answers, and configure Prefect to use it.

        A server that is killed meanwhile is started again, twice at most.

        Raises:
            PrefectServerError: the server was not started, ended, or did not answer in time.
        """
        with ExitStack() as stack:
            self._listener = stack.enter_context(_listen(self._wanted_port))
            self._set_address(self._listener.getsockname()[1])
            try:
                self._process = self._start()
            except OSError as error:
                raise PrefectServerError(
                    f"the Prefect server was not started: {error}; its log has to be in a folder"
                    " that can be written: set PREFECT_HOME to one"
                ) from error
            stack.callback(self._stop)
            for is_last in (False, False, True):
                if self._is_ready(self._process, is_last):
                    break
                self._process = self._start()
            # Removed before the server ends: until then no other server has the port.
            stack.enter_context(self.login.stored())
            stack.enter_context(using_server(self.api_url, self.login.password))
            self._on_exit = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._on_exit.close()

    @property
    def has_ended(self) -> bool:
        return self._process is not None and not self._process.lives()

    def restart(self) -> None:
        """Start the server again after it has ended, on its port and database.

        Returns before the server answers. Connections wait until then.

        Raises:
            OSError: the process cannot be started, for example for lack of memory.
        """
        self._stop()  # it has ended; its exit code is taken
        self._process = self._start()

    def refuse_connections(self) -> None:
        """End the connections that wait for a server. Call it only after the server has ended."""
        with suppress(OSError):  # none waits any more, or this process has too many open files
            while True:
                self._listener.accept()[0].close()

    def _set_address(self, port: int) -> None:
        from prefect.settings import get_current_settings

        self.port = port
        # As browsers write it: without the default port.
        self.ui_url = f"http://{HOST}" if port == 80 else f"http://{HOST}:{port}"
        self.api_url = f"{self.ui_url}/api"
        self.login = ServerLogin(
            chosen_settings().get("PREFECT_SERVER_API_AUTH_STRING") or new_password(),
            password_path(get_current_settings().home, port),
        )

    def _start(self) -> Child:
        # The child inherits a socket that already listens, and this process keeps it: while it
        # lives, no other process can take the port and with it the password.
        fd = self._listener.fileno()
        variables = {
            **self._settings,
            **chosen_settings(),
            # An environment variable: other users can read a command line.
            "PREFECT_SERVER_API_AUTH_STRING": self.login.password,
            "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": self.ui_url,
            "PREFECT_UI_API_URL": self.api_url,
            "PREFECT_UI_URL": self.ui_url,
        }
        command = [SCRIPT, str(fd), str(os.getpid())]
        return start_child(command, variables, self.log_path, (fd,))

    def _stop(self) -> None:
        if self._process is not None:
            self._process.end(STOP_TIMEOUT_SECONDS)

    def _is_ready(self, process: Child, is_last: bool) -> bool:
        """Wait until the server answers. False if a signal has ended it, unless that `is_last`."""
        limit_seconds = self._start_timeout_seconds
        deadline = time.monotonic() + limit_seconds
        # The kernel accepts the connection at once; the answer comes when the server is ready. A
        # connection that waits is not closed when the server ends.
        with closing(HTTPConnection(HOST, self.port, timeout=limit_seconds)) as connection:
            connection.request("GET", "/api/health")
            while not wait([connection.sock], START_POLL_SECONDS) and process.lives():
                if time.monotonic() > deadline:
                    process.kill()
                    raise PrefectServerError(
                        f"the Prefect server did not answer {self.api_url}/health within"
                        f" {limit_seconds} s. Increase"
                        " PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS if the machine is slow;"
                        f" {log_tail(self.log_path)}"
                    )
            if process.lives() and _is_ok(connection):
                return True
        process.end(STOP_TIMEOUT_SECONDS)
        if not is_last and (process.exit_code or 0) < 0:
            return False
        raise PrefectServerError(
            f"the Prefect server ended with exit code {process.exit_code} during its start;"
            f" {log_tail(self.log_path)}"
        )


def _is_ok(connection: HTTPConnection) -> bool:
    try:
        return connection.getresponse().status == HTTPStatus.OK
    except (OSError, HTTPException):  # it ended after it had accepted the connection
        return False


def _listen(port: int) -> socket.socket:
    try:
        listener = socket.create_server((HOST, port))
    except OSError:
        listener = socket.create_server((HOST, 0))
    listener.setblocking(False)
    return listener


def using_server(api_url: str, password: str) -> AbstractContextManager[None]:
    """Make Prefect use a server of this machine for the block."""
    variables = {
        "PREFECT_API_URL": api_url,
        "PREFECT_API_AUTH_STRING": password,
        "PREFECT_UI_URL": api_url.removesuffix("/api"),
    }
    for name in ("no_proxy", "NO_PROXY"):  # a configured HTTP proxy cannot reach it
        variables[name] = ",".join(filter(None, [os.environ.get(name), HOST]))
    return environment(variables)


def start_child(
    command: list[str],
    variables: Mapping[str, str],
    log_path: Path | None,
    fds: tuple[int, ...] = (),
    answers: bool = False,
) -> Child:
    """Run a Python script that starts Prefect, and ends when its standard input does.

    Its output is appended to the log; None: it is this process's. If it `answers`, its standard
    output holds lines for this process instead.
    """
    with ExitStack() as opened:
        log = None
        if log_path is not None:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            log = opened.enter_context(log_path.open("ab"))
        variables = {**variables, **LOG_EVERYTHING}
        return Child(command, variables, log=log, answers=answers, descriptors=fds)


def local_server(port: int, log_path: Path, start_timeout_seconds: float) -> PrefectServerProcess:
    """The server of `trialflow up`, with all services: it schedules, cleans up and automates.

    It uses any free port if `port` is taken.
    """
    return PrefectServerProcess(log_path, start_timeout_seconds, port, SETTINGS_OF_UP)


@contextmanager
def restarting(server: PrefectServerProcess) -> Iterator[None]:
    """Start `server` again, on its port and database, whenever it ends during the block.

    Training does not need a server, and continues meanwhile. Requests wait until the server answers
    again, for up to a minute each, so states, log lines and events arrive late.
    """
    is_over = threading.Event()
    thread = threading.Thread(target=_keep, args=(server, is_over), name="server-restarts")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _keep(server: PrefectServerProcess, is_over: threading.Event) -> None:
    started_at, pause_seconds = time.monotonic(), 0.0
    while not is_over.wait(RESTART_POLL_SECONDS):
        if not server.has_ended:
            continue
        was_healthy = time.monotonic() - started_at > HEALTHY_SECONDS
        pause_seconds = min(2 * pause_seconds or FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS)
        pause_seconds = 0.0 if was_healthy else pause_seconds
        for _ in range(round(pause_seconds / RESTART_POLL_SECONDS)):
            # It has ended several times, and may never answer: clients learn that without delay.
            if pause_seconds > FIRST_PAUSE_SECONDS:
                server.refuse_connections()
            if is_over.wait(RESTART_POLL_SECONDS):
                return
        started_at = time.monotonic()
        with suppress(OSError):  # no memory for a process: after the next pause
            server.restart()
