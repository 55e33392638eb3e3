"""Platforms are told of a run's progress: a file, and the status server of Kubeflow Trainer."""

from __future__ import annotations

import json
import logging
import ssl
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.driving import TRIAL, drive
from tests.support.slots import toy_config
from tests.support.waiting import until
from tests.trial_core.driver.test_drive import FullMachine
from trial_core.config import ExperimentConfig
from trial_core.errors import LaunchError, Stopped
from trial_core.messages import MetricsKind
from trial_core.observe.events.observers import Observer
from trial_core.observe.report import kubeflow_status, run_updates
from trial_core.observe.report.kubeflow_status import trainer_status
from trial_core.observe.report.run_updates import Place, RunUpdate, RunUpdates
from trial_core.schedule import ending
from trial_core.schedule.ending import Ending
from trial_core.schedule.stop_requests import StopHandler

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/mine/status"
logger = logging.getLogger(__name__)


class StatusServer(ThreadingHTTPServer):
    """Kubeflow Trainer's status server.

    Attributes:
        taken: path, token and body of each request.
        answers: the status code of its answers.
        may_answer: clear: it hangs.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.taken: list[tuple[str, str, dict[str, Any]]] = []
        self.answers = 200
        self.may_answer = threading.Event()
        self.may_answer.set()
        certificate, key = folder / "ca.crt", folder / "key.pem"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
             "-nodes", "-keyout", key, "-out", certificate, "-days", "1", "-subj", "/CN=status",
             "-addext", "subjectAltName=IP:127.0.0.1"],
            check=True, capture_output=True,
        )  # fmt: skip
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.socket = context.wrap_socket(self.socket, server_side=True)


class _Handler(BaseHTTPRequestHandler):
    server: StatusServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.taken.append((self.path, self.headers["Authorization"], body))
        self.server.may_answer.wait()
        self.send_response(self.server.answers)
        self.end_headers()
        self.wfile.write(b'{"message": "Forbidden"}')

    def log_message(self, *arguments: Any) -> None:
        """Not to stderr."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StatusServer]:
    """The server, named in the environment as in a pod of a TrainJob."""
    (tmp_path / "token").write_text("a-token\n")
    with StatusServer(tmp_path) as found:
        thread = threading.Thread(target=found.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setenv(
            "KUBEFLOW_TRAINER_SERVER_URL", f"https://127.0.0.1:{found.server_port}{PATH}"
        )
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(tmp_path / "ca.crt"))
        yield found
        found.may_answer.set()
        found.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Updates follow at once; runs are kept in the test's folder."""
    monkeypatch.setattr(run_updates, "UPDATE_SECONDS", 0.02)
    monkeypatch.setenv("TRIALFLOW_HOME", str(tmp_path / "home"))


def read(folder: Path) -> dict[str, Any]:
    """The progress file of the run; empty: there is none yet."""
    file = folder / "home" / TRIAL / "progress.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def small(folder: Path, **changes: Any) -> ExperimentConfig:
    """An experiment of 10 batches, with metrics after 4, 8 and 10 of them."""
    return toy_config(
        folder, entrypoint="pytorch_trials:Small", scheduling_unit=4,
        min_validation_period={"batches": 4}, **changes,
    )  # fmt: skip


class Looks(Observer):
    """Looks at the progress after the fourth batch's validation.

    Attributes:
        seen: what the file said.
    """

    def __init__(self, folder: Path, stopping: StopHandler | None = None) -> None:
        self.seen: dict[str, Any] = {}
        self._folder = folder
        self._stopping = stopping

    def metrics_reported(self, kind: MetricsKind, batches: int, metrics: Mapping[str, Any]) -> None:
        if (kind, batches) != ("validation", 4):
            return
        self.seen = until(self._validated, "the file has the validation")
        if self._stopping is not None:
            self._stopping.ask("cancelled", "in the UI")

    def _validated(self) -> dict[str, Any]:
        found = read(self._folder)
        return found if found.get("metrics", {}).get("validation") else {}


@pytest.mark.long
@pytest.mark.slots
def test_a_platform_follows_a_run(tmp_path: Path, server: StatusServer) -> None:
    """While it trains and at its end, in the file and in the status of the TrainJob."""
    looks = Looks(tmp_path)
    drive(small(tmp_path), observer=looks)
    seen = looks.seen
    assert (seen["status"], seen["percent"], seen["batches"], seen["total_batches"]) == (
        "running", 40.0, 4, 10,
    )  # fmt: skip
    assert (seen["trial"], seen["experiment"], seen["why"]) == (TRIAL, "toy", "")
    assert seen["seconds_left"] >= 0
    assert seen["stage"]
    assert seen["metrics"]["training"]["loss"] > 0
    assert datetime.fromisoformat(seen["updated_at"]).tzinfo is not None
    end = read(tmp_path)
    assert (end["status"], end["percent"], end["batches"], end["seconds_left"], end["stage"]) == (
        "completed", 100.0, 10, 0, "",
    )  # fmt: skip
    assert {(path, token) for path, token, _ in server.taken} == {(PATH, "Bearer a-token")}
    told = [body["trainerStatus"] for _, _, body in server.taken]
    assert "progressPercentage" not in told[0]
    assert 40 in [each.get("progressPercentage") for each in told]
    metrics = {each["name"]: each["value"] for each in told[-1]["metrics"]}
    assert float(metrics["validation_loss"]) == end["metrics"]["validation"]["loss"]
    assert (told[-1]["progressPercentage"], told[-1]["estimatedRemainingSeconds"]) == (100, 0)
    assert told[-1]["lastUpdatedTime"] == end["updated_at"]


@pytest.mark.slots
@pytest.mark.long
def test_a_stopped_run_says_why(tmp_path: Path) -> None:
    """Its percentage is what it has trained, and no time is left to wait for."""
    with StopHandler(60.0) as stopping:
        drive(small(tmp_path), stopping=stopping, observer=Looks(tmp_path, stopping))
    end = read(tmp_path)
    assert (end["status"], end["percent"], end["seconds_left"]) == ("stopped", 40.0, None)
    assert end["why"].startswith("cancelled (in the UI); saved at batch 4")


def test_a_failed_run_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: StatusServer
) -> None:
    """Also one that launches no ranks; in the file that a platform has chosen."""
    chosen = tmp_path / "platform" / "status.json"
    monkeypatch.setenv("TRIALFLOW_PROGRESS_FILE", str(chosen))
    with pytest.raises(LaunchError):
        drive(small(tmp_path), joining=FullMachine())
    end = json.loads(chosen.read_text())
    assert (end["status"], end["why"], end["percent"]) == ("failed", "too few slots", None)
    assert read(tmp_path) == {}
    assert "progressPercentage" not in server.taken[-1][2]["trainerStatus"]


def test_a_run_that_is_stopped_before_it_trains_says_why(tmp_path: Path) -> None:
    """Who asked, and what became of it."""
    joining = FullMachine(Stopped("no ranks ran"))
    with StopHandler(60.0) as stopping:
        stopping.ask("suspended", "in the UI")
        stopping.wait(60.0)
        with pytest.raises(Stopped):
            drive(small(tmp_path), stopping=stopping, joining=joining)
    end = read(tmp_path)
    assert (end["status"], end["why"]) == ("stopped", "suspended (in the UI); no ranks ran")


def endpoint() -> Place:
    """The status server of the environment."""
    found = kubeflow_status.kubeflow_status()
    assert found is not None
    return found


@contextmanager
def told(*places: Place) -> Iterator[RunUpdates]:
    """A run of two batches that reports to these places."""
    with RunUpdates("mine", TRIAL, places, Ending(), logger=logger) as report:
        report.run_started(TRIAL, 2, 0, 16)
        yield report
        report.batches_trained(2)
        report.run_ended("completed")


def test_a_server_that_hangs_holds_nothing(
    tmp_path: Path, server: StatusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends, and the file says so, while the server has not answered yet."""
    monkeypatch.setattr(ending, "TOTAL_SECONDS", 1.0)
    monkeypatch.setattr(kubeflow_status, "TIMEOUT_SECONDS", 600.0)
    (tmp_path / "home" / TRIAL).mkdir(parents=True)
    server.may_answer.clear()
    with told(run_updates.progress_file(tmp_path / "home" / TRIAL), endpoint()):
        until(lambda: server.taken, "a request")
    assert read(tmp_path)["status"] == "completed"
    assert len(server.taken) == 1
    server.may_answer.set()
    until(lambda: len(server.taken) == 2, "the last update")
    assert server.taken[-1][2]["trainerStatus"]["progressPercentage"] == 100


def test_a_server_that_refuses_is_one_warning(
    server: StatusServer, caplog: pytest.LogCaptureFixture
) -> None:
    """It says what was answered, and not the token. A later answer may be another one."""
    server.answers = 403
    with told(endpoint()):
        until(lambda: len(server.taken) > 2, "three requests")
    [warning] = caplog.messages
    assert "the status of the TrainJob is not up to date" in warning
    assert '403 Forbidden: {"message": "Forbidden"}' in warning
    assert "a-token" not in warning


@pytest.mark.parametrize(
    ("name", "value", "seen"),
    [
        ("KUBEFLOW_TRAINER_SERVER_URL", "http://127.0.0.1:9/status", "expected https://"),
        ("KUBEFLOW_TRAINER_SERVER_TOKEN", "/no/token", "/no/token"),
        ("KUBEFLOW_TRAINER_SERVER_CA_CERT", "", "CERTIFICATE_VERIFY_FAILED"),
    ],
)
def test_the_token_goes_to_that_server_alone(
    server: StatusServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    name: str, value: str, seen: str,
) -> None:  # fmt: skip
    """Over https, with the given certificate; else nothing is sent, and the warning says why."""
    monkeypatch.setenv(name, value)
    with told(endpoint()):
        pass
    [warning] = caplog.messages
    assert seen in warning
    assert server.taken == []


def test_only_what_the_schema_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 256 metrics of 64 characters, and 100 % only once all is done."""
    many = {f"layer_{number}": number / 7 for number in range(300)} | {"x" * 65: 1.0}
    running = RunUpdate(
        trial=TRIAL, experiment="mine", status="running", why="", percent=100.0, batches=2,
        total_batches=2, seconds_left=2**40, stage="validate @2", updated_at="2026-01-02T03:04:05Z",
        metrics={"training": many, "validation": {"loss": 0.5}},
    )  # fmt: skip
    status = trainer_status(running)["trainerStatus"]
    assert (status["progressPercentage"], status["estimatedRemainingSeconds"]) == (99, 2**31 - 1)
    assert len(status["metrics"]) == 256
    assert {"name": "validation_loss", "value": "0.5"} in status["metrics"]
    assert max(len(each["name"]) for each in status["metrics"]) <= 64


def test_metrics_are_finite_numbers() -> None:
    """JSON has no others: a loss that is not a number is left out."""
    with told() as report:
        report.metrics_reported("training", 1, {"loss": float("nan"), "text": "a", "rate": 0.25})
        found = report.progress()
    assert found.metrics == {"training": {"rate": 0.25}, "validation": {}}
