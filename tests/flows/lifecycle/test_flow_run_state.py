"""A 404 ends a run only if its flow run was really deleted, and a waiting run is not lost."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import FlowRunContext
from prefect.exceptions import Abort, ObjectNotFound, TerminationSignal
from prefect.states import Cancelling, Running

from tests.support.prefect import isolated
from trialflow.flows.lifecycle.flow_run_state import FlowRunReader, requeue_if_stopped
from trialflow.flows.server.prefect_settings import environment

RUN = FlowRun(id=uuid4(), flow_id=uuid4(), name="gpt")
FOUND = (200, RUN.model_dump_json())
UNKNOWN = (404, json.dumps({"detail": "Flow run not found"}))
HEALTHY = (200, "true")
PROXYS_404 = (404, "<html>no such page</html>")
PROXYS_200 = (200, "<html>we are back soon</html>")
WAITING = RUN.model_copy(update={"deployment_id": uuid4()})
ACCEPTED = (201, json.dumps({"status": "ACCEPT", "details": {}, "state": {"type": "SCHEDULED"}}))


class Server(BaseHTTPRequestHandler):
    """A server, or a proxy before it.

    Attributes:
        run, health, accepted: status and body of its answers; the last to a new state of the run.
    """

    run: ClassVar[tuple[int, str]]
    health: ClassVar[tuple[int, str]]
    accepted: ClassVar[tuple[int, str]]

    def do_GET(self) -> None:
        self._answer(*(self.health if self.path.endswith("/health") else self.run))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(*self.accepted)

    def _answer(self, status: int, body: str) -> None:
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
        plain = {"PREFECT_API_URL": url, "PREFECT_CLIENT_CSRF_SUPPORT_ENABLED": "false"}
        with environment({**isolated(tmp_path), **plain}):
            yield Watching()
        server.shutdown()
        thread.join()


@pytest.mark.long
def test_a_server_that_restarts_deletes_no_run(watching: Watching) -> None:
    """Two times 50 s of 404, and an answer between them."""
    for _ in range(2):
        assert not watching.is_deleted_within(50, UNKNOWN)
        assert not watching.is_deleted_within(5, FOUND)


@pytest.mark.parametrize(
    "health", [PROXYS_404, pytest.param(PROXYS_200, marks=pytest.mark.long)], ids=["404", "200"]
)
def test_a_proxy_deletes_no_run(watching: Watching, health: tuple[int, str]) -> None:
    """Its 404 counts at no time: the health check is not answered by Prefect."""
    assert not watching.is_deleted_within(150, PROXYS_404, health)
    assert not watching.is_deleted_within(50, UNKNOWN)


def test_a_deleted_run_is_noticed(watching: Watching) -> None:
    """After a minute in which the healthy server does not know it."""
    assert not watching.is_deleted_within(60, UNKNOWN)
    assert watching.is_deleted_within(5, UNKNOWN)


def shown(state: State[Any]) -> tuple[int, str]:
    """The answer that the waiting run has this state."""
    return 200, WAITING.model_copy(update={"state": state}).model_dump_json()


@pytest.mark.usefixtures("watching")
@pytest.mark.parametrize(
    ("run", "accepted", "end"),
    [
        (shown(Running()), ACCEPTED, Abort),
        (shown(Cancelling()), ACCEPTED, TerminationSignal),
        (UNKNOWN, ACCEPTED, TerminationSignal),
        (shown(Running()), UNKNOWN, TerminationSignal),
    ],
    ids=["running", "cancelled", "no answer", "not accepted"],
)
def test_a_run_that_is_stopped_while_it_waits(
    run: tuple[int, str], accepted: tuple[int, str], end: type[BaseException]
) -> None:
    """It goes back into its queue, unless it was cancelled or the server does not take it back."""
    Server.run, Server.accepted = run, accepted
    with (
        FlowRunContext.model_construct(flow_run=WAITING),
        pytest.raises(end),
        requeue_if_stopped("GPUs"),
    ):
        raise TerminationSignal(signal=signal.SIGTERM)
