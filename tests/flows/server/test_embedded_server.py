"""The embedded server: silent, complete, and gone with its run."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
import uvicorn
from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE

from tests.support.browser import chromium
from tests.support.prefect import PrefectServer, isolated, prepared
from tests.support.wire import OTHER_PAGE, Wire
from trialflow.deployments.cli import doctor
from trialflow.deployments.cli.deploy import configured_client
from trialflow.flows.server.embedded_server import prefect_api
from trialflow.flows.server.prefect_server import PrefectServerError, PrefectServerProcess
from trialflow.flows.server.prefect_settings import environment
from trialflow.flows.server.server_login import ServerLogin, password_path
from trialflow.flows.server.server_script import LOCK, RunServer
from trialflow.flows.server.single_instance import single_instance

pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tests/support/scripts/embedded_flow.py"
# More than the server stores while they run, so that some are left for its shutdown.
TASKS = 60
OUTPUT = ["begin", f"sum {sum(n * n for n in range(TASKS + 1))}", "end"]
TIMEOUT_SECONDS = 60.0
CLOSED_PORT = "http://127.0.0.1:9"


def newcomer(home: Path, variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment without any Prefect configuration but PREFECT_HOME."""
    kept = {
        name: value
        for name, value in os.environ.items()
        # In CI, Prefect does not show its notices.
        if not name.startswith(("PREFECT", "DO_NOT_TRACK", "CI", "GITHUB_"))
    }
    return {**kept, "PYTHONPATH": str(ROOT), "PREFECT_HOME": str(home), **(variables or {})}


def terminal_output(command: list[str], variables: Mapping[str, str]) -> list[str]:
    """Run `command` on a terminal; the lines that the terminal shows."""
    reader, terminal = pty.openpty()
    with subprocess.Popen(command, env=variables, stdin=terminal, stdout=terminal, stderr=terminal):
        os.close(terminal)
        shown = b""
        while chunk := _read(reader):
            shown += chunk
    os.close(reader)
    return shown.decode().splitlines()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # no process has the terminal open any more
        return b""


def servers_of(driver_pid: int) -> list[int]:
    """The servers that the process `driver_pid` has started, even if it is dead."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if "server_script.py" in " ".join(process.info["cmdline"] or ())
        and process.info["cmdline"][-1] == str(driver_pid)
    ]


@pytest.fixture(scope="module")
def used_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PREFECT_HOME after its first run, whose terminal output is in the file ``shown``.

    A proxy that does not answer is configured: the run must not use it for 127.0.0.1.
    """
    home = tmp_path_factory.mktemp("prefect-home")
    variables = newcomer(home, {"http_proxy": CLOSED_PORT, "HTTP_PROXY": CLOSED_PORT})
    command = [sys.executable, str(SCRIPT), str(TASKS)]
    (home / "shown").write_text("\n".join(terminal_output(command, variables)))
    return home


@contextmanager
def waiting_flow(home: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A command whose flow waits until it is stopped, in its own session; a link to the run."""
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), "3", "hold"],
        env=newcomer(home), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as driver:  # fmt: skip
        assert driver.stdout is not None
        try:
            lines = [driver.stdout.readline() for _ in range(2)]
            assert lines[1].startswith("http"), lines
            yield driver, lines[1].strip()
        finally:
            driver.kill()


@pytest.mark.long
def test_the_terminal_shows_the_commands_own_lines_alone(used_home: Path) -> None:
    """Nothing of Prefect's, even in the first run of a new database."""
    assert (used_home / "shown").read_text().splitlines() == OUTPUT


@pytest.mark.long
def test_the_database_has_all_of_a_run(used_home: Path) -> None:
    """Every task run is stored as completed, and every log line."""
    with closing(sqlite3.connect(used_home / "prefect.db")) as database:
        [(run, state)] = database.execute(
            "SELECT id, state_name FROM flow_run ORDER BY start_time LIMIT 1"
        )
        tasks = database.execute(
            "SELECT name, state_name FROM task_run WHERE flow_run_id = ?", [run]
        ).fetchall()
        logged = database.execute("SELECT message FROM log WHERE flow_run_id = ?", [run]).fetchall()
    assert state == "Completed"
    assert sorted(tasks) == sorted((f"square {n}", "Completed") for n in range(TASKS + 1))
    assert {"squaring", *(f"squared {n}" for n in range(TASKS + 1))} <= {row[0] for row in logged}


def test_one_server_starts_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server holds the lock of PREFECT_HOME while it prepares the database."""
    is_locked: list[bool] = []

    async def prepare(self: uvicorn.Server, sockets: Any = None) -> None:
        with (tmp_path / LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                is_locked.append(True)

    monkeypatch.setattr(uvicorn.Server, "startup", prepare)
    with environment(isolated(tmp_path)):
        asyncio.run(RunServer(uvicorn.Config("no.such:app"), os.getpid()).startup())
    assert is_locked == [True]


@pytest.mark.long  # test_a_run_that_is_stopped has Ctrl-C
def test_ctrl_c_interrupts_the_flow_alone(used_home: Path) -> None:
    """SIGINT to the foreground group: the server records the flow's end, then ends as well."""
    with waiting_flow(used_home) as (driver, page):
        assert len(servers_of(driver.pid)) == 1
        os.killpg(driver.pid, signal.SIGINT)
        rest, _ = driver.communicate(timeout=60)
        assert servers_of(driver.pid) == []
    assert rest.splitlines() == ["the flow is interrupted", "the command is interrupted", "end"]
    run_id = page.partition("?")[0].rpartition("/")[2]
    with closing(sqlite3.connect(used_home / "prefect.db")) as database:
        found = database.execute("SELECT state_name FROM flow_run WHERE id = ?", [run_id])
        assert found.fetchall() == [("Crashed",)]


@pytest.mark.long
def test_a_killed_server_is_started_again(tmp_path: Path) -> None:
    """On the same port and database. The flow continues, and its end is stored."""
    with environment(isolated(prepared(tmp_path))), prefect_api() as api:

        @task(cache_policy=NO_CACHE)
        def after_the_kill() -> None:
            get_run_logger().info("still running")

        @flow
        def killing() -> None:
            (server,) = servers_of(os.getpid())
            os.kill(server, signal.SIGKILL)
            after_the_kill()

        killing()
        assert httpx.get(f"{api.api_url}/health", timeout=TIMEOUT_SECONDS).json() is True
    assert servers_of(os.getpid()) == []
    with closing(sqlite3.connect(tmp_path / "prefect.db")) as database:
        for table in ("flow_run", "task_run"):
            found = database.execute(f"SELECT state_name FROM {table}").fetchall()
            assert found == [("Completed",)], table
        assert ("still running",) in database.execute("SELECT message FROM log").fetchall()


@pytest.mark.long
@pytest.mark.browser
def test_the_ui_shows_a_run_while_it_runs(used_home: Path) -> None:
    """The page that the flow prints shows its task runs before the flow ends."""
    with waiting_flow(used_home) as (_, page), chromium() as browser:
        browser.open(page, expecting="square 3")
        assert "Running" in browser.text


def test_a_configured_server_is_used(prefect_server: PrefectServer, tmp_path: Path) -> None:
    """A profile names a server: no other server is started."""
    (tmp_path / "profiles.toml").write_text(
        f'active = "mine"\n[profiles.mine]\nPREFECT_API_URL = "{prefect_server.api_url}"\n'
    )
    said: list[str] = []
    with environment(isolated(tmp_path)), prefect_api(waiting_for=said.append) as api:
        assert (api.api_url, api.is_embedded) == (prefect_server.api_url, False)
        assert servers_of(os.getpid()) == []
    assert said == ["connecting to the configured Prefect server"]


def test_the_server_of_a_running_up_is_used(prefect_server: PrefectServer, tmp_path: Path) -> None:
    """Where none is configured: no other server is started on the same database. While it is
    starting, it is awaited."""
    password = password_path(tmp_path, urlsplit(prefect_server.api_url).port or 80)
    with environment(isolated(tmp_path)), single_instance(tmp_path) as store_address:
        said: list[str] = []

        def note(what: str) -> None:
            if "which is starting" in what:
                store_address(f"{prefect_server.api_url} (password: in {password})")
                password.write_text("me:secret\n")
            said.append(what)

        with prefect_api(waiting_for=note) as api:
            assert ["which is starting" in what for what in said] == [True, False]
            assert said[-1] == "connecting to the server of `trialflow up`"
            assert (api.api_url, api.ui_url) == (prefect_server.api_url, prefect_server.ui_url)
            assert (api.is_of_up, api.is_embedded) == (True, False)
            assert api.login == ServerLogin("me:secret", password)
            assert servers_of(os.getpid()) == []
            assert os.environ["PREFECT_API_AUTH_STRING"] == "me:secret"
        assert os.environ.get("PREFECT_API_URL", "") != prefect_server.api_url
        assert prefect_server.api_url in str(doctor.prefect_server())
        assert "of `trialflow up`" in str(doctor.prefect_server())
        with configured_client() as client:
            assert str(client.api_url).startswith(prefect_server.api_url)


def test_a_server_that_stops_answering_a_command(prefect_server: PrefectServer) -> None:
    """It is no bug of trialflow's, whose message would say nothing of a server."""
    with prefect_server.configured():
        stops = pytest.raises(
            PrefectServerError, match=r"not answer any more \(ReadTimeout: slow\)"
        )
        with stops, configured_client():
            raise httpx.ReadTimeout("slow")


def test_a_configured_server_that_does_not_answer(tmp_path: Path) -> None:
    """The message has the server's address and what to do."""
    variables = {**isolated(tmp_path), "PREFECT_API_URL": f"{CLOSED_PORT}/api"}
    with (
        environment(variables),
        pytest.raises(PrefectServerError, match=r"127\.0\.0\.1:9/api does not .*unset"),
        prefect_api(),
    ):
        pass


def test_an_address_that_is_not_the_apis(tmp_path: Path) -> None:
    """As that of the UI, which answers every request with its page."""
    with Wire(9) as wire:
        wire.cut(OTHER_PAGE)
        url = f"http://127.0.0.1:{wire.port}"
        with (
            environment({**isolated(tmp_path), "PREFECT_API_URL": url}),
            pytest.raises(PrefectServerError, match=r"is not the API .*ends with /api"),
            prefect_api(),
        ):
            pass


@pytest.mark.long
def test_a_server_that_cannot_start(tmp_path: Path) -> None:
    """The message has the exit code, and the cause from the server's log."""
    database = f"sqlite+aiosqlite:///{tmp_path}/no/such/folder/prefect.db"
    variables = {**isolated(tmp_path), "PREFECT_SERVER_DATABASE_CONNECTION_URL": database}
    with (
        environment(variables),
        pytest.raises(PrefectServerError, match=r"exit code 3(?s:.*)unable to open database file"),
        prefect_api(),
    ):
        pass


def test_a_server_that_starts_too_slowly(tmp_path: Path) -> None:
    """The message names the setting to increase; the server is stopped."""
    with (
        environment(isolated(tmp_path)),
        pytest.raises(PrefectServerError, match=r"within 0.1 s.*STARTUP_TIMEOUT_SECONDS"),
        PrefectServerProcess(tmp_path / "server.log", start_timeout_seconds=0.1),
    ):
        pass
    assert servers_of(os.getpid()) == []


@pytest.mark.long
def test_the_users_settings_win(tmp_path: Path) -> None:
    """A profile's log level enables the console, and its analytics stay on."""
    (tmp_path / "profiles.toml").write_text(
        'active = "mine"\n[profiles.mine]\nPREFECT_LOGGING_LEVEL = "INFO"\n'
        'PREFECT_SERVER_ANALYTICS_ENABLED = "true"\n'
    )
    program = (
        "from trialflow.flows.server.prefect_settings import prepare_prefect; prepare_prefect()\n"
        "from prefect import get_client; from prefect.logging import get_logger\n"
        "from prefect.settings import get_current_settings\n"
        "get_logger().info('to the console')\n"
        "print(get_current_settings().server.analytics_enabled)"
    )
    shown = terminal_output([sys.executable, "-c", program], newcomer(tmp_path))
    assert [line.split(" - ")[-1] for line in shown] == ["to the console", "True"]
