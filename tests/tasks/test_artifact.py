"""The report on a real Prefect server."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from prefect import flow
from prefect.logging import get_run_logger

import trial_core.observe.report.live_report
import trialflow.tasks.artifact
from tests.support.prefect import PrefectServer, isolated
from tests.support.slots import toy_config
from tests.support.waiting import until
from tests.support.wire import OTHER_PAGE, UNAVAILABLE
from trial_core.common.text_format import unique_slug
from trial_core.observe.report.live_report import Report
from trialflow.flows.server.embedded_server import flush
from trialflow.flows.server.prefect_settings import environment
from trialflow.tasks.artifact import (
    MarkdownArtifact,
    ReportArtifact,
    forget_unsent,
    send_unsent,
)
from trialflow.tasks.client_retries import NO_ANSWER

pytestmark = pytest.mark.server


def artifacts(server: PrefectServer, key: str) -> list[dict[str, Any]]:
    """The artifacts of that key."""
    found: list[dict[str, Any]] = server.query(
        "artifacts/filter", {"artifacts": {"key": {"any_": [key]}}}
    )
    return found


@pytest.mark.long
def test_a_flow_run_has_one_artifact(prefect_server: PrefectServer) -> None:
    """A retry updates it in place; another flow run of the trial has its own, with the same key."""
    tries = []

    @flow(retries=1)
    def run() -> None:
        tries.append(1)
        artifact = ReportArtifact("Toy.run_0000beef")
        artifact.write(f"first, try {len(tries)}")
        artifact.write(f"second, try {len(tries)}")
        if len(tries) == 1:
            raise RuntimeError("once")

    with prefect_server.configured():
        run()
        run()
        flush()
    found = artifacts(prefect_server, unique_slug("trial-Toy.run_0000beef"))
    assert sorted(each["data"] for each in found) == ["second, try 2", "second, try 3"]
    assert len({each["flow_run_id"] for each in found}) == 2


@pytest.mark.parametrize("instead", [UNAVAILABLE, OTHER_PAGE], ids=["unavailable", "a page"])
def test_a_server_that_does_not_answer_is_asked_once(tmp_path: Path, instead: bytes) -> None:
    """Prefect's own repetitions, with pauses that double, would hold up the end of a run.

    What a proxy answers in its place is no answer either, and ends no report.
    """
    asked: list[bytes] = []

    def answer(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    asked.append(connection.recv(65536))
                    connection.sendall(instead)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        with (
            environment({**isolated(tmp_path), "PREFECT_API_URL": url}),
            pytest.raises(NO_ANSWER),
        ):
            ReportArtifact("toy-0000beef").write("text")
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert len(asked) == 1


class Artifact(MarkdownArtifact):
    """An artifact of a server that is away until it answers.

    Attributes:
        sent: what the server has taken.
        look: called when a run asks whether the artifact is its own.
    """

    def __init__(self, flow_run: UUID | None = None) -> None:
        super().__init__("report", "of a test")
        self._flow_run_id = flow_run
        self.is_away, self.sent = True, list[str]()
        self.look: Callable[[], None] = lambda: None

    def _send(self, text: str) -> None:
        if self.is_away:
            raise httpx.ConnectError("away")
        self.sent.append(text)

    def write_in_vain(self, text: str) -> None:
        with pytest.raises(httpx.ConnectError):
            self.write(text)

    def belongs_to(self, flow_run_id: UUID | None) -> bool:
        self.look()
        return super().belongs_to(flow_run_id)


@pytest.fixture
def no_unsent(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other test's texts are unsent."""
    monkeypatch.setattr(trialflow.tasks.artifact, "_unsent", {})


@pytest.mark.usefixtures("no_unsent")
def test_a_text_is_kept_until_the_server_takes_it_or_the_run_ends() -> None:
    """A later attempt at the run does not send an older text over its own."""
    artifact = Artifact()
    artifact.write_in_vain("first")
    with pytest.raises(httpx.ConnectError):
        send_unsent()
    artifact.is_away = False
    send_unsent()
    assert artifact.sent == ["first"]
    artifact.is_away = True
    artifact.write_in_vain("second")
    forget_unsent()
    artifact.is_away = False
    send_unsent()
    assert artifact.sent == ["first"]


@pytest.mark.usefixtures("no_unsent")
def test_another_run_may_write_while_this_one_sends() -> None:
    """They share a process in a user's program, and each has its own texts."""
    mine, other, late = Artifact(), Artifact(uuid4()), Artifact(uuid4())
    mine.write_in_vain("mine")
    other.write_in_vain("other")
    mine.look = lambda: late.write_in_vain("late")
    mine.is_away = other.is_away = False
    send_unsent()
    forget_unsent()
    other.send_last()
    assert (mine.sent, other.sent) == (["mine"], ["other"])


def test_the_artifact_is_updated_during_a_workload(
    prefect_server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batches move before the workload ends; updates keep their distance."""
    monkeypatch.setattr(trial_core.observe.report.live_report, "UPDATE_SECONDS", 0.3)
    written: list[float] = []
    write = ReportArtifact.write

    def record(self: ReportArtifact, text: str) -> None:
        written.append(time.monotonic())
        write(self, text)

    monkeypatch.setattr(ReportArtifact, "write", record)
    key = "trial-toy-live"

    @flow
    def run() -> None:
        report = Report(
            toy_config(tmp_path), "toy-live", tmp_path, logger=get_run_logger(),
            publish=ReportArtifact("toy-live").write, publish_errors=NO_ANSWER,
        )  # fmt: skip
        with report:
            report.run_started("toy-live", 1000, 0, 16)
            report.stage_started("train-workload", "[0→1000]")
            batches = iter(range(50, 599))

            def has_moved() -> bool:
                report.batches_trained(next(batches))
                found = artifacts(prefect_server, key)
                return any("batch 5" in each["data"] for each in found)

            until(has_moved, "an update of the artifact")
            report.run_ended("completed")

    with prefect_server.configured():
        run()
        flush()
    assert "**completed**" in artifacts(prefect_server, key)[0]["data"]
    by_thread = written[:-1]  # the last write is at the end of the run
    assert all(b - a >= 0.3 for a, b in pairwise(by_thread))
