"""A Prefect server of a user's own, which goes when the process that started it goes, however that
ends: SIGKILL included.

It is the one that a single run brings along (`trialflow.flows.server.embedded`), with all its services: it
schedules, cleans up, and acts on automations. It uses the user's own database (PREFECT_HOME).
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import httpx

import trialflow.flows.server.server_process
from trialflow.deployments.resources import LASTING_LEASE_STORAGE
from trialflow.flows.server.embedded import HOST, PrefectServerError
from trialflow.flows.server.prefect_settings import chosen_settings, environment

STOP_LIMIT_SECONDS = 45.0
POLL_SECONDS = 0.1
LOG_TAIL_BYTES = 4000
# How long no server may have run; ISO 8601.
REMEMBERED = "P30D"


class LocalServer:
    """Prefect's API and UI on this machine, used by this process, for the length of a block.

    Args:
        port: where; if somebody else listens there, on another port.
        log_path: where its log goes (appended).
        start_limit_seconds: how long it may take to start.

    Attributes:
        port: where it is.
        api_url, ui_url: where its API and its UI are.
        log_path: where its log goes.
    """

    def __init__(self, port: int, log_path: Path, start_limit_seconds: float) -> None:
        with _listener(port) as listener:
            self.port: int = listener.getsockname()[1]
            self.ui_url = f"http://{HOST}:{self.port}"
            self.api_url = f"{self.ui_url}/api"
            self.log_path = log_path
            self._start_limit_seconds = start_limit_seconds
            fd = listener.fileno()
            variables = {
                "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": LASTING_LEASE_STORAGE,
                # What became due for an automation while no server ran would be forgotten a minute
                # after the start: runs that were lost with the last server would stay lost.
                "PREFECT_SERVER_EVENTS_EXPIRED_BUCKET_BUFFER": REMEMBERED,
                # How soon it sees that a run has crashed; by default up to 5 s later.
                "PREFECT_SERVER_EVENTS_PROACTIVE_GRANULARITY": "PT1S",
                **chosen_settings(),
                "PREFECT_UI_API_URL": self.api_url,
                "PREFECT_UI_URL": self.ui_url,
            }
            command = [trialflow.flows.server.server_process.__file__, str(fd), str(os.getpid())]
            self._process = start(command, variables, log_path, (fd,))
        self._used = contextlib.ExitStack()

    def __enter__(self) -> LocalServer:
        """Wait until it answers.

        Raises:
            PrefectServerError: it ended, or did not answer in time.
        """
        try:
            self._wait_until_it_answers()
        except BaseException:
            self.__exit__()
            raise
        self._used.enter_context(
            environment(
                {"PREFECT_API_URL": self.api_url, "PREFECT_UI_URL": self.ui_url, **_direct()}
            )
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self._used.close()
        end(self._process, STOP_LIMIT_SECONDS)

    @property
    def has_ended(self) -> bool:
        """Whether it has ended by itself."""
        return self._process.poll() is not None

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + self._start_limit_seconds
        while True:
            try:
                # The connection is accepted at once, the answer comes when the server is ready.
                left = max(deadline - time.monotonic(), 0.1)
                url = f"{self.api_url}/health"
                httpx.get(url, timeout=left, trust_env=False).raise_for_status()
            except httpx.HTTPError as error:
                if not self.has_ended and time.monotonic() < deadline:
                    time.sleep(POLL_SECONDS)
                    continue
                how = "ended while it started" if self.has_ended else "did not answer in time"
                raise PrefectServerError(
                    f"Prefect's server {how} ({type(error).__name__}: {error}); "
                    f"{log_tail(self.log_path)}"
                ) from None
            return


def log_tail(log_path: Path) -> str:
    """How a log ends, for a message."""
    with log_path.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
        tail = log.read().decode(errors="replace").strip()
    return f"its log {log_path} ends with:\n{tail}" if tail else f"its log: {log_path}"


def _listener(port: int) -> socket.socket:
    try:
        return socket.create_server((HOST, port))
    except OSError:
        return socket.create_server((HOST, 0))


def _direct() -> dict[str, str]:
    """Variables that keep requests to this machine out of a configured HTTP proxy."""
    return {
        name: ",".join(filter(None, [os.environ.get(name), HOST]))
        for name in ("no_proxy", "NO_PROXY")
    }


def start(
    command: list[str],
    variables: Mapping[str, str],
    log_path: Path | None,
    fds: tuple[int, ...] = (),
) -> subprocess.Popen[bytes]:
    """Start a script of ours in a session of its own, which the terminal's Ctrl-C does not reach.

    It ends when its standard input does.

    Args:
        variables: environment variables, over those of this process.
        log_path: where its output goes (appended); None: where that of this process goes.
        fds: open files that it gets as well.
    """
    # Prefect was told to be quiet on this process's terminal. A file has nothing to be quiet for.
    levels = ("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "PREFECT_LOGGING_HANDLERS_DEBUG_LEVEL")
    environment = {**os.environ, **variables, **dict.fromkeys(levels, "INFO")}
    with contextlib.ExitStack() as opened:
        log = None
        if log_path is not None:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            log = opened.enter_context(log_path.open("ab"))
        return subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=fds,
            start_new_session=True,
            env=environment,
        )


def end(process: subprocess.Popen[bytes], limit_seconds: float) -> None:
    """Its standard input ends; it writes what it has, and goes."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(limit_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
