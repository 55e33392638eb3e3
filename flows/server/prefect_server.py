"""A Prefect server that lives as long as a block of this process.

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
import subprocess
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from trial_core.errors import TrialflowError
from trialflow.flows.server.child_process import log_tail, start_child, stop_child
from trialflow.flows.server.prefect_settings import chosen_settings, environment
from trialflow.flows.server.server_login import (
    HOST,
    ServerLogin,
    new_password,
    password_path,
)

SCRIPT = str(Path(__file__).with_name("server_script.py"))


class PrefectServerError(TrialflowError):
    """The configured Prefect server does not answer, or our own did not start."""


class PrefectServerProcess:
    """Prefect's API and UI on this machine, used by this process. A context manager.

    The server ends with the block. It also ends, within 10 s, when this process is killed.

    Args:
        log_path: the file that the server's log is appended to.
        start_timeout_seconds: how long the server may take to answer.
        port: 0, or a taken port: any free one.
        settings: Prefect settings of the server that the user's own override, as environment
            variables.

    Attributes:
        port, api_url, ui_url: where the server listens, once the block is entered.
        login: how this user's commands and browser log in.
    """

    port: int
    api_url: str
    ui_url: str
    login: ServerLogin

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
        self._process: subprocess.Popen[bytes] | None = None
        self._on_exit = ExitStack()

    def __enter__(self) -> PrefectServerProcess:
        """Start the server, wait until it answers, and configure Prefect to use it.

        Raises:
            PrefectServerError: the server ended, or did not answer in time.
        """
        with ExitStack() as stack:
            with _listener(self._wanted_port) as listener:
                self._set_address(listener.getsockname()[1])
                self._process = self._start(listener)
            stack.callback(self._stop)
            self._wait_until_ready(self._process)
            # Removed before the server ends: until then no other server has the port.
            stack.enter_context(self.login.stored())
            stack.enter_context(using_server(self.api_url, self.login.password))
            self._on_exit = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._on_exit.close()

    @property
    def has_ended(self) -> bool:
        """Whether the server has ended by itself."""
        return self._process is not None and self._process.poll() is not None

    def restart(self) -> None:
        """Start the server again after it has ended, on its port and database.

        Returns before the server answers. Connections wait until then.

        Raises:
            OSError: another process has taken the port.
        """
        with socket.create_server((HOST, self.port)) as listener:
            self._process = self._start(listener)

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

    def _start(self, listener: socket.socket) -> subprocess.Popen[bytes]:
        # The child inherits a socket that already listens: no race for the port, no polling.
        fd = listener.fileno()
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
            stop_child(self._process)

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        import httpx

        url, limit_seconds = f"{self.api_url}/health", self._start_timeout_seconds
        try:
            # The kernel accepts the connection at once; the answer comes when the server is ready.
            httpx.get(url, timeout=limit_seconds, trust_env=False).raise_for_status()
        except httpx.TimeoutException:
            process.kill()
            raise PrefectServerError(
                f"the Prefect server did not answer {url} within {limit_seconds} s. Increase"
                " PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS if the machine is slow;"
                f" {log_tail(self.log_path)}"
            ) from None
        except httpx.HTTPError as error:
            stop_child(process)
            raise PrefectServerError(
                f"the Prefect server ended with exit code {process.returncode} during its start"
                f" ({type(error).__name__}: {error}); {log_tail(self.log_path)}"
            ) from None


def _listener(port: int) -> socket.socket:
    try:
        return socket.create_server((HOST, port))
    except OSError:
        return socket.create_server((HOST, 0))


def using_server(api_url: str, password: str) -> AbstractContextManager[None]:
    """Make Prefect use a server of this machine for the block."""
    variables = {
        "PREFECT_API_URL": api_url,
        "PREFECT_API_AUTH_STRING": password,
        "PREFECT_UI_URL": api_url.removesuffix("/api"),
    }
    return environment({**variables, **_no_proxy()})


def _no_proxy() -> dict[str, str]:
    """Variables that exempt this machine from a configured HTTP proxy."""
    return {
        name: ",".join(filter(None, [os.environ.get(name), HOST]))
        for name in ("no_proxy", "NO_PROXY")
    }
