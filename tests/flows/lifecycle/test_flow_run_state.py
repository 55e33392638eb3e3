"""A 404 ends a run only if its flow run was really deleted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound

from tests.support.prefect import isolated
from trialflow.flows.lifecycle.flow_run_state import FlowRunReader
from trialflow.flows.server.prefect_settings import environment

RUN = FlowRun(id=uuid4(), flow_id=uuid4(), name="gpt")
FOUND = (200, RUN.model_dump_json())
UNKNOWN = (404, json.dumps({"detail": "Flow run not found"}))
HEALTHY = (200, "true")
PROXYS_404 = (404, "<html>no such page</html>")
PROXYS_200 = (200, "<html>we are back soon</html>")


class Server(BaseHTTPRequestHandler):
    """A server, or a proxy before it.

    Attributes:
        run, health: status and body of its answers.
    """

    run: ClassVar[tuple[int, str]]
    health: ClassVar[tuple[int, str]]

    def do_GET(self) -> None:
        status, body = self.health if self.path.endswith("/health") else self.run
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing on stderr."""


class Clock:
    """Seconds that the test counts."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Watching:
    """A run that reads its state every 5 s."""

    def __init__(self) -> None:
        self._clock = Clock()
        self._reader = FlowRunReader(RUN.id, self._clock)

    def is_deleted_within(
        self, seconds: int, run: tuple[int, str], health: tuple[int, str] = HEALTHY
    ) -> bool:
        """Whether these answers count as a deletion within so many seconds."""
        Server.run, Server.health = run, health
        for _ in range(0, seconds, 5):
            self._clock.now += 5
            try:
                if self._reader.read() is None:
                    return True
            except ObjectNotFound:
                pass
        return False


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[Watching]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/api"
        with environment({**isolated(tmp_path), "PREFECT_API_URL": url}):
            yield Watching()
        server.shutdown()
        thread.join()


@pytest.mark.long
def test_a_server_that_restarts_deletes_no_run(watching: Watching) -> None:
    """Two times 50 s of 404, and an answer between them."""
    for _ in range(2):
        assert not watching.is_deleted_within(50, UNKNOWN)
        assert not watching.is_deleted_within(5, FOUND)


@pytest.mark.parametrize("health", [PROXYS_404, PROXYS_200])
def test_a_proxy_deletes_no_run(watching: Watching, health: tuple[int, str]) -> None:
    """Its 404 counts at no time: the health check is not answered by Prefect."""
    assert not watching.is_deleted_within(150, PROXYS_404, health)
    assert not watching.is_deleted_within(50, UNKNOWN)


def test_a_deleted_run_is_noticed(watching: Watching) -> None:
    """After a minute in which the healthy server does not know it."""
    assert not watching.is_deleted_within(60, UNKNOWN)
    assert watching.is_deleted_within(5, UNKNOWN)
