"""Running a flow in a command: exit codes and errors, without ranks."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from tests.support.slots import toy_config
from trial_core.errors import CheckpointDamaged, Stopped, TrialflowError
from trialflow.deployments.cli.flow_run import FlowRun, StateHook
from trialflow.deployments.cli.run_display import PlainLines
from trialflow.flows.server import embedded_server
from trialflow.flows.server.server_login import ServerLogin
from trialflow.tasks import ui_page

Waiting = Callable[[str], None]
EXPERIMENT = toy_config(Path("/none"), code="/code", resources={"preload": False})
LOGIN = ServerLogin("me:secret", Path("/file"))
API = embedded_server.PrefectApi("http://server/api", "http://server", Path("/server.log"), LOGIN)


@pytest.fixture
def out() -> io.StringIO:
    """What the display prints to."""
    return io.StringIO()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, out: io.StringIO) -> FlowRun[str]:
    """A flow run with a fake Prefect server."""

    @contextmanager
    def prefect_api(waiting_for: Waiting) -> Iterator[embedded_server.PrefectApi]:
        waiting_for("starting a server")
        yield API

    monkeypatch.setattr(embedded_server, "prefect_api", prefect_api)
    monkeypatch.setattr(ui_page, "ui_page", lambda path: f"http://server/v2/{path}")
    return FlowRun(PlainLines(out), EXPERIMENT)


def test_a_flow_that_returns(run: FlowRun[str], out: io.StringIO) -> None:
    """The exit code is 0; the result, the flow run's id and its page are known."""

    def call(on_running: StateHook) -> str:
        on_running(None, SimpleNamespace(id="1234"), None)
        return "result"

    assert run.run(call) == 0
    assert (run.result, run.flow_run_id) == ("result", "1234")
    assert run.later_ui is not None
    assert run.later_ui.startswith("prefect server start, then http://127.0.0.1:4200/v2/")
    page = "http://server/v2/runs/flow-run/1234"
    assert f"watch it at {page} (password: in /file)\n" in out.getvalue()
    assert out.getvalue().startswith("starting a server…\n")


@pytest.mark.usefixtures("run")
def test_the_link_on_a_terminal(out: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """It logs in. A log file, which others may read, has no password (see above)."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    run = FlowRun[str](PlainLines(out), EXPERIMENT)
    run.run(lambda on_running: str(on_running(None, SimpleNamespace(id="1234"), None)))
    assert "watch it at http://server/trialflow/v2/runs/flow-run/1234#me:secret\n" in out.getvalue()


def test_what_a_library_prints(run: FlowRun[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Ray prints in the driver's process. It is on stderr: stdout may be read by a program."""

    def call(on_running: StateHook) -> str:
        print("of a library")
        return "result"

    assert run.run(call) == 0
    assert capsys.readouterr() == ("", "of a library\n")


@pytest.mark.parametrize(
    ("number", "name", "exit_code"),
    [(signal.SIGINT, "Ctrl-C", 130), (signal.SIGTERM, "SIGTERM", 143)],
)
def test_a_signal(
    run: FlowRun[str],
    number: signal.Signals,
    name: str,
    exit_code: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A signal ends the flow with the shell's exit code for it."""

    def call(on_running: StateHook) -> str:
        os.kill(os.getpid(), number)
        signal.pause()
        return "not reached"

    assert run.run(call) == exit_code
    assert (run.result, run.stopped_by) == (None, name)
    assert capsys.readouterr().err == f"stopped by {name}\n"


def test_a_signal_while_the_server_ends(run: FlowRun[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The flow has returned and the command is stopped: no result, as the exit code says."""

    @contextmanager
    def prefect_api(waiting_for: Waiting) -> Iterator[embedded_server.PrefectApi]:
        yield API
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded_server, "prefect_api", prefect_api)
    assert run.run(lambda on_running: "result") == 130
    assert (run.result, run.stopped_by) == (None, "Ctrl-C")


@pytest.mark.parametrize(
    ("raised", "failure", "message"),
    [
        (CheckpointDamaged("bad.pt"), CheckpointDamaged, "error: bad.pt"),
        (
            httpx.HTTPStatusError(
                "401",
                request=httpx.Request("POST", "http://server/api"),
                response=httpx.Response(httpx.codes.UNAUTHORIZED),
            ),
            embedded_server.PrefectServerError,
            "http://server/api was started again, with another password, while this run was on it",
        ),
        (
            httpx.ConnectError("refused"),
            embedded_server.PrefectServerError,
            "the Prefect server at http://server/api failed during the run "
            "(ConnectError: refused); its log: /server.log",
        ),
    ],
)
def test_an_error(
    run: FlowRun[str],
    raised: Exception,
    failure: type[TrialflowError],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An error is printed; an error of Prefect's client names the server and its log."""

    def call(on_running: StateHook) -> str:
        raise raised

    assert run.run(call) != 0
    assert isinstance(run.failure, failure)
    assert message in capsys.readouterr().err


def test_a_cancelled_flow(run: FlowRun[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A run that is cancelled in Prefect counts as stopped. It is no error."""
    from prefect.exceptions import CancelledRun

    def call(on_running: StateHook) -> str:
        raise CancelledRun("Stopped: cancelled (in Prefect); saved at batch 4")

    assert run.run(call) != 0
    assert isinstance(run.failure, Stopped)
    assert capsys.readouterr().err == "Stopped: cancelled (in Prefect); saved at batch 4\n"
