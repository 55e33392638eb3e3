"""The embedded Prefect server: silent, complete, and gone when its run is."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.browser import chromium
from tests.support.prefect import PrefectServer, isolated, running_server
from tests.support.processes import wait_until_gone
from trialflow.flows.server.embedded import PrefectServerError, prefect_api
from trialflow.flows.server.prefect_settings import environment

pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tests/support/scripts/embedded_flow.py"
# More than the server writes down while they run, so that some is left for its stop.
TASKS = 60
SAID = ["begin", f"sum {sum(n * n for n in range(TASKS + 1))}", "end"]
NOBODY = "http://127.0.0.1:9"


def newcomer(home: Path, variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of somebody who has configured nothing of Prefect, with PREFECT_HOME."""
    kept = {
        name: value
        for name, value in os.environ.items()
        # In CI, Prefect does not show its notices.
        if not name.startswith(("PREFECT", "DO_NOT_TRACK", "CI", "GITHUB_"))
    }
    return {**kept, "PYTHONPATH": str(ROOT), "PREFECT_HOME": str(home), **(variables or {})}


def on_terminal(command: list[str], variables: Mapping[str, str]) -> list[str]:
    """The lines that a terminal shows while `command` runs to its end."""
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
    except OSError:  # the last process that had it open is gone
        return b""


def servers_of(driver_pid: int) -> list[int]:
    """The embedded servers that the process `driver_pid` has started, alive or dead itself."""
    found = psutil.process_iter(["cmdline"])
    return [
        process.pid
        for process in found
        if "embedded_server.py" in " ".join(process.info["cmdline"] or ())
        and process.info["cmdline"][-1] == str(driver_pid)
    ]


@pytest.fixture(scope="module")
def used_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PREFECT_HOME in which there has been a run, its first; what that showed is in ``shown``."""
    home = tmp_path_factory.mktemp("prefect-home")
    command = [sys.executable, str(SCRIPT), str(TASKS)]
    (home / "shown").write_text("\n".join(on_terminal(command, newcomer(home))))
    return home


@contextmanager
def held(home: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A command whose flow waits to be stopped, in a session of its own; the page of its run."""
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), "3", "hold"],
        env=newcomer(home), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as driver:  # fmt: skip
        assert driver.stdout is not None
        try:
            said = [driver.stdout.readline() for _ in range(2)]
            assert said[1].startswith("http"), said
            yield driver, said[1].strip()
        finally:
            driver.kill()


def test_the_first_run_shows_its_own_lines_alone(used_home: Path) -> None:
    """With no database yet, a terminal sees nothing of Prefect's."""
    assert (used_home / "shown").read_text().splitlines() == SAID


def test_a_later_run_shows_its_own_lines_alone(used_home: Path) -> None:
    """With a database there, nor; and a configured HTTP proxy is not asked for 127.0.0.1."""
    variables = newcomer(used_home, {"http_proxy": NOBODY, "HTTP_PROXY": NOBODY})
    assert on_terminal([sys.executable, str(SCRIPT), str(TASKS)], variables) == SAID


def test_all_of_a_run_is_in_the_database(used_home: Path) -> None:
    """`prefect server start` shows every task run as completed, and what they logged."""
    with running_server(used_home) as server:
        [first] = server.query("flow_runs/filter", {"sort": "START_TIME_ASC", "limit": 1})
        of_first = {"flow_runs": {"id": {"any_": [first["id"]]}}}
        runs = server.query("task_runs/filter", {**of_first, "limit": 200})
        logged = [
            line["message"]
            for offset in (0, 100)
            for line in server.query(
                "logs/filter",
                {"logs": {"flow_run_id": {"any_": [first["id"]]}}, "limit": 100, "offset": offset},
            )
        ]
    assert first["state_name"] == "Completed"
    assert sorted((run["name"], run["state_name"]) for run in runs) == sorted(
        (f"square {number}", "Completed") for number in range(TASKS + 1)
    )
    assert {"squaring", *(f"squared {number}" for number in range(TASKS + 1))} <= set(logged)


def test_one_server_starts_at_a_time(used_home: Path) -> None:
    """While another server of the same PREFECT_HOME prepares the database, a server waits."""
    with (used_home / "trialflow-server.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with subprocess.Popen(
            [sys.executable, str(SCRIPT), "1"], env=newcomer(used_home)
        ) as driver:
            while not waits_for_a_lock(servers_of(driver.pid)):
                assert driver.poll() is None
                time.sleep(0.1)
            fcntl.flock(lock, fcntl.LOCK_UN)
    assert driver.returncode == 0


def waits_for_a_lock(pids: list[int]) -> bool:
    """Whether one of these processes is blocked by a lock on a file."""
    waiting = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return any(words[1] == "->" and int(words[5]) in pids for words in waiting)


def test_the_server_goes_with_a_killed_driver(used_home: Path) -> None:
    """10 s after a SIGKILL of the process that runs the flow, its server is gone."""
    with held(used_home) as (driver, _):
        servers = servers_of(driver.pid)
        driver.kill()
        driver.wait()
        assert len(servers) == 1
        assert wait_until_gone(servers, timeout_seconds=10) == []


def test_ctrl_c_interrupts_the_flow_alone(used_home: Path) -> None:
    """SIGINT to the foreground group, as from a terminal: the flow ends in good order, its end is
    recorded, and no process is left."""
    with held(used_home) as (driver, page):
        os.killpg(driver.pid, signal.SIGINT)
        rest, _ = driver.communicate(timeout=60)
        assert servers_of(driver.pid) == []
    assert rest.splitlines() == ["the flow is interrupted", "the command is interrupted", "end"]
    run_id = page.rpartition("/")[2]
    with closing(sqlite3.connect(used_home / "prefect.db")) as database:
        found = database.execute("SELECT state_name FROM flow_run WHERE id = ?", [run_id])
        assert found.fetchall() == [("Crashed",)]


@pytest.mark.browser
def test_the_ui_shows_a_run_while_it_runs(used_home: Path) -> None:
    """The page that the flow has named shows its task runs before it has ended."""
    with held(used_home) as (_, page), chromium() as browser:
        browser.open(f"{page}?tab=TaskRuns", expecting="square 3")
        assert "Running" in browser.text


def test_a_configured_server_is_used(prefect_server: PrefectServer, tmp_path: Path) -> None:
    """A server that a profile names is the API; no other is started."""
    (tmp_path / "profiles.toml").write_text(
        f'active = "mine"\n[profiles.mine]\nPREFECT_API_URL = "{prefect_server.api_url}"\n'
    )
    with environment(isolated(tmp_path)), prefect_api() as api:
        assert (api.api_url, api.is_embedded) == (prefect_server.api_url, False)
        assert servers_of(os.getpid()) == []


def test_a_configured_server_that_is_down(tmp_path: Path) -> None:
    """The message says which server was asked and what can be done."""
    variables = {**isolated(tmp_path), "PREFECT_API_URL": f"{NOBODY}/api"}
    with (
        environment(variables),
        pytest.raises(PrefectServerError, match=r"127\.0\.0\.1:9/api, which does not .*unset"),
        prefect_api(),
    ):
        pass


def test_a_server_that_cannot_start(tmp_path: Path) -> None:
    """The message says how the server ended, and shows the cause from its log."""
    database = f"sqlite+aiosqlite:///{tmp_path}/no/such/folder/prefect.db"
    variables = {**isolated(tmp_path), "PREFECT_SERVER_DATABASE_CONNECTION_URL": database}
    with (
        environment(variables),
        pytest.raises(PrefectServerError, match=r"exit code 3(?s:.*)unable to open database file"),
        prefect_api(),
    ):
        pass


def test_a_server_that_is_late(tmp_path: Path) -> None:
    """The message names the setting that gives it longer; the server is stopped."""
    limit = {"PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "1"}
    with (
        environment({**isolated(tmp_path), **limit}),
        pytest.raises(PrefectServerError, match=r"within 1 s.*STARTUP_TIMEOUT_SECONDS"),
        prefect_api(),
    ):
        pass
    assert servers_of(os.getpid()) == []


def test_settings_that_the_user_has_chosen_win(tmp_path: Path) -> None:
    """A profile's log level brings back the console, and its analytics stay on."""
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
    shown = on_terminal([sys.executable, "-c", program], newcomer(tmp_path))
    assert [line.split(" - ")[-1] for line in shown] == ["to the console", "True"]
