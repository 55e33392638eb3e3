"""The port of a server is the starting process's alone, and a server that ends is started again.

On stand-ins for Prefect and for the server.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import cast

import pytest

from tests.support.prefect import ROOT, isolated
from tests.support.waiting import until
from trialflow.flows.server import prefect_server
from trialflow.flows.server.prefect_server import (
    PrefectServerError,
    PrefectServerProcess,
    restarting,
)
from trialflow.flows.server.prefect_settings import environment

SCRIPT = ROOT / "tests/support/scripts/stand_in_server.py"
HOST = "127.0.0.1"
TIMEOUT_SECONDS = 60.0


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start the stand-in instead of Prefect's server."""
    monkeypatch.setattr(prefect_server, "SCRIPT", str(SCRIPT))
    with environment(isolated(tmp_path)):
        yield


def server(
    folder: Path, does: str, timeout_seconds: float = TIMEOUT_SECONDS
) -> PrefectServerProcess:
    """A stand-in that will "answer" requests, "hang", or "end" or "accept" a connection and end.

    Or "die" of SIGKILL; with a file, only until that file is there.
    """
    settings = {"STAND_IN_SERVER": does}
    return PrefectServerProcess(folder / "log", timeout_seconds, settings=settings)


def kill(running: PrefectServerProcess) -> None:
    """Kill the server's process, as the kernel does when memory runs out."""
    assert running._process is not None
    os.kill(running._process.pid, signal.SIGKILL)
    until(lambda: running.has_ended, "the end of the server")


@contextmanager
def request(port: int) -> Iterator[HTTPConnection]:
    """A request that has been sent."""
    connection = HTTPConnection(HOST, port, timeout=TIMEOUT_SECONDS)
    connection.request("GET", "/")
    yield connection
    connection.close()


def test_no_other_process_gets_the_port_of_a_killed_server(tmp_path: Path) -> None:
    """So none gets the password. A request waits for the next server. The port is free at the
    end."""
    with server(tmp_path, "answer") as running:
        kill(running)
        with pytest.raises(OSError, match="in use"):
            socket.create_server((HOST, running.port))
        with request(running.port) as waiting:
            running.restart()
            assert waiting.getresponse().status == 200
    socket.create_server((HOST, running.port)).close()


def test_a_server_that_does_not_return_refuses_requests(tmp_path: Path) -> None:
    """Also those that wait already: otherwise clients would learn it after a minute each."""
    with server(tmp_path, "answer") as running:
        kill(running)
        with request(running.port) as first, request(running.port) as second:
            running.refuse_connections()
            for waiting in (first, second):
                with pytest.raises(ConnectionError):
                    waiting.getresponse()


@pytest.mark.parametrize("does", ["end", "accept"])
def test_a_server_that_ends_during_its_start(tmp_path: Path, does: str) -> None:
    """That is said at once, although the port still takes connections."""
    with (
        pytest.raises(PrefectServerError, match="ended with exit code 3 during its start"),
        server(tmp_path, does),
    ):
        pass


def test_a_server_that_is_killed_during_its_start_is_started_again(tmp_path: Path) -> None:
    """As one that is killed later. One that is killed each time is an error, which says by what."""
    with server(tmp_path, f"die {tmp_path / 'once'}") as running, request(running.port) as sent:
        assert sent.getresponse().status == 200
    assert (tmp_path / "once").read_text() == "1"
    with (
        pytest.raises(PrefectServerError, match="ended with exit code -9 during its start"),
        server(tmp_path, "die"),
    ):
        pass


def test_a_server_that_does_not_start_in_time_is_ended(tmp_path: Path) -> None:
    """The error says so and what to do. Its process, which hears nothing, is gone."""
    hanging = server(tmp_path, "hang", timeout_seconds=0.1)
    with pytest.raises(PrefectServerError, match=r"did not answer .* within 0\.1 s. Increase"):
        hanging.__enter__()
    assert hanging.has_ended
    with socket.create_server((HOST, hanging.port)):
        pass


def test_a_server_that_cannot_write_its_log(tmp_path: Path) -> None:
    """The error says what to do."""
    (tmp_path / "file").touch()
    with (
        pytest.raises(PrefectServerError, match=r"was not started: .*set PREFECT_HOME"),
        server(tmp_path / "file", "answer"),
    ):
        pass


class EndedServer:
    """A server that has ended, and that the machine has no memory for at first."""

    def __init__(self) -> None:
        self.restarts = 0
        self.has_ended = True
        self.is_back = threading.Event()
        self.refused_after: set[int] = set()

    def restart(self) -> None:
        self.restarts += 1
        if self.restarts < 3:
            raise OSError("cannot allocate memory")
        self.has_ended = False
        self.is_back.set()

    def refuse_connections(self) -> None:
        self.refused_after.add(self.restarts)


def test_a_restart_is_repeated_until_it_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no more often. Connections wait for the first restart; while they are repeated, they are
    refused. The thread ends with the block."""
    monkeypatch.setattr(prefect_server, "RESTART_POLL_SECONDS", 0.001)
    monkeypatch.setattr(prefect_server, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(prefect_server, "MAX_PAUSE_SECONDS", 0.002)
    ended = EndedServer()
    with restarting(cast(PrefectServerProcess, ended)):
        assert ended.is_back.wait(TIMEOUT_SECONDS)
    assert ended.restarts == 3
    assert ended.refused_after == {1, 2}
    assert "server-restarts" not in {thread.name for thread in threading.enumerate()}
