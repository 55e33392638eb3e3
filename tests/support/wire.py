"""A network connection to a server on this machine, which a test can cut and mend."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import prefect.client.base
import pytest
from prefect.events.clients import PrefectEventsClient

from tests.support.prefect import PrefectServer
from trialflow.flows.lifecycle.stop_monitor import StopMonitor
from trialflow.flows.server.embedded_server import flush
from trialflow.flows.server.prefect_settings import environment

UNAVAILABLE = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbusy"
)
OTHER_PAGE = b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\nConnection: close\r\n\r\n<html/>"
UNAUTHORIZED = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Wire:
    """Forwards connections to a port of 127.0.0.1. While it is cut, they are refused, or answered
    as by a proxy whose server is away.

    A context manager.

    Attributes:
        port: where it listens; the same after it was mended.
        is_whole: whether it forwards connections.
    """

    def __init__(self, to_port: int) -> None:
        self._to_port = to_port
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._timers: list[threading.Timer] = []
        self.port = 0
        self.is_whole = False

    def __enter__(self) -> Wire:
        self.mend()
        return self

    def __exit__(self, *exception: object) -> None:
        for timer in self._timers:
            timer.join()
        self.cut()
        for thread in self._threads:
            thread.join()

    def cut(self, answer: bytes = b"") -> None:
        """End all connections, and refuse new ones.

        Args:
            answer: what a proxy answers instead; empty: there is none.
        """
        self.is_whole = False
        self._end_all()
        if answer:
            self._listen(self._answer, answer)

    def _end_all(self) -> None:
        with self._lock:
            for each in self._sockets:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()
            self._sockets.clear()

    def mend(self) -> None:
        """Accept connections again."""
        self._end_all()
        self._listen(self._accept)
        self.is_whole = True

    def _listen(self, work: Callable[..., None], *arguments: Any) -> None:
        listener = socket.create_server(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        with self._lock:
            self._sockets.append(listener)
        self._start(work, listener, *arguments)

    def mend_in(self, seconds: float) -> None:
        """Accept connections again after a while."""
        self._timers.append(threading.Timer(seconds, self.mend))
        self._timers[-1].start()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # it is cut
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to_port))
                with self._lock:
                    self._sockets += [near, far]
                self._start(self._pump, near, far)
                self._start(self._pump, far, near)

    def _answer(self, listener: socket.socket, answer: bytes) -> None:
        with suppress(OSError):  # it is mended
            while True:
                near, _ = listener.accept()
                with near, suppress(OSError):
                    near.recv(65536)
                    near.sendall(answer)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()


class RetriesWhileWhole:
    """The value of a Prefect setting: no retries while the wire is cut.

    A whole one retries, because a busy server on SQLite answers 503 now and then.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def value(self) -> int:
        return 5 if self._wire.is_whole else 0


@pytest.fixture
def wire(prefect_server: PrefectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    """The connection of flows to the server. While it is cut, Prefect tries everything once."""
    attempts = (None, 0, 700, 30.0)
    monkeypatch.setattr(PrefectEventsClient.__init__, "__defaults__", attempts)
    with Wire(httpx.URL(prefect_server.api_url).port or 80) as wire:
        # A setting would not reach the threads that Prefect has already started.
        retries = RetriesWhileWhole(wire)
        monkeypatch.setattr(prefect.client.base, "PREFECT_CLIENT_MAX_RETRIES", retries)
        variables = {
            "PREFECT_API_URL": f"http://127.0.0.1:{wire.port}/api",
        }
        with environment({**prefect_server.environment, **variables}):
            yield wire
            if not wire.is_whole:
                wire.mend()
            flush()  # a later test would wait for events that nobody takes any more


def mend_at_the_end(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the wire mended some seconds after a run first waits for the server.

    Prefect sends log lines every two seconds.
    """
    original = StopMonitor.await_server

    has_begun = False

    def mend_and_await(self: StopMonitor) -> None:
        nonlocal has_begun
        if not has_begun:
            wire.mend_in(4.0)
        has_begun = True
        original(self)

    monkeypatch.setattr(StopMonitor, "await_server", mend_and_await)
