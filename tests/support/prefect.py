"""A real Prefect server and a real process worker for tests, stopped by pid.

Tests that use them carry the marker ``server``. Prefect reads its settings when it is imported, so
a test talks to the server either from another process (``server.environment``) or inside
``with server.configured():``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import certifi
import filelock
import httpx
import pytest

from tests.support.processes import descendants, wait_until_gone
from trialflow.deployments import process_reaper
from trialflow.flows.server.prefect_settings import environment

START_LIMIT_SECONDS = 120.0
STOP_LIMIT_SECONDS = 15.0
# On SQLite, a server with several writers may not answer for a minute.
STANDSTILL_SECONDS = 90.0
ROOT = Path(__file__).parents[2]
ELSEWHERE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
"""Is set where servers of tests have another database than their own SQLite file."""
PREPARED = "TRIALFLOW_TEST_PREPARED"
"""The folder of what is made once: a database that new servers copy, and a certificate."""
MAKE_DATABASE = """
import asyncio
from prefect.server.database import provide_database_interface
from prefect.server.models.block_registration import run_block_auto_registration

async def make():
    database = provide_database_interface()
    await database.create_db()
    async with await database.session() as session:
        await run_block_auto_registration(session)

asyncio.run(make())
"""
"""Makes what a server makes when it starts: Prefect's tables, and its types of blocks."""
HAS_DATABASE = {
    "PREFECT_SERVER_DATABASE_MIGRATE_ON_START": "false",
    "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",
}
"""Settings with which a server uses a prepared database as it is, and starts sooner."""


@dataclass(frozen=True)
class PrefectServer:
    """A running server with its UI and its own database."""

    api_url: str
    ui_url: str
    home: Path

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which a process uses this server and no user settings."""
        return {
            **isolated(self.home),
            "PREFECT_API_URL": self.api_url,
            # Each client asks for a token before its first change, and the server wants none.
            "PREFECT_CLIENT_CSRF_SUPPORT_ENABLED": "false",
        }

    def configured(self) -> AbstractContextManager[None]:
        """Make flows of this process use this server, for a block."""
        return environment(self.environment)

    def query(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The API's answer to a GET request, or with a `body` to a POST request.

        Like Prefect's client, asks again while the server says that its database is busy.
        """
        url = f"{self.api_url}/{path}"
        deadline = time.monotonic() + STANDSTILL_SECONDS
        with plain_client(STANDSTILL_SECONDS) as client:
            while True:
                answer = client.get(url) if body is None else client.post(url, json=dict(body))
                if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                    return answer.raise_for_status().json()
                assert time.monotonic() < deadline, f"{url} answers 503"
                time.sleep(0.2)

    def prefect(self, *arguments: str, cwd: Path = ROOT) -> str:
        """Run a Prefect CLI command against this server; its output.

        Raises:
            AssertionError: the command failed.
        """
        done = subprocess.run(
            [sys.executable, "-m", "prefect", "--no-prompt", *arguments],
            cwd=cwd,
            env={**os.environ, **self.environment},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        if done.returncode:
            raise AssertionError(f"prefect {' '.join(arguments)} failed:\n{done.stdout}")
        return done.stdout


def plain_client(timeout_seconds: float = 5.0) -> httpx.Client:
    """A client for servers without TLS, whose certificates take longer to load than an answer."""
    return httpx.Client(timeout=timeout_seconds, verify=False)


def isolated(home: Path) -> dict[str, str]:
    """Environment variables that keep Prefect to the folder `home` and off the network."""
    return {
        "PREFECT_API_SSL_CERT_FILE": str(one_certificate()),
        "PREFECT_HOME": str(home),
        "PREFECT_PROFILES_PATH": str(home / "profiles.toml"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }


@pytest.fixture(scope="session", autouse=True)
def prepared_files(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Choose the folder of prepared files: pytest's cache, so that later sessions have them too.

    Processes of one session share it.
    """
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    if (cache := getattr(request.config, "cache", None)) is not None:
        made_by = hashlib.sha256(MAKE_DATABASE.encode()).hexdigest()[:8]
        folder = cache.mkdir(f"prefect-{version('prefect')}-{made_by}")
    os.environ[PREPARED] = str(folder)


def one_certificate() -> Path:
    """A file with one certificate. Each client of Prefect loads all those that it is to trust,
    which takes longer than its requests; servers of tests have no TLS."""
    file = Path(os.environ[PREPARED], "certificate.pem")
    if not file.exists():
        end = "-----END CERTIFICATE-----\n"
        making = file.with_name(f"certificate-{os.getpid()}.pem")
        making.write_text(Path(certifi.where()).read_text().partition(end)[0] + end)
        making.rename(file)
    return file


def prepared(home: Path) -> Path:
    """Make `home` a PREFECT_HOME with an empty database, so that a server starts at once.

    Prefect's migrations take as long as the rest of a server's start. A server with another
    database makes them there.
    """
    home.mkdir(parents=True, exist_ok=True)
    if ELSEWHERE in os.environ:
        return home
    template = Path(os.environ[PREPARED], "prefect")
    with filelock.FileLock(f"{template}.lock"):  # processes may share `home`, too
        if (home / "prefect.db").exists():
            return home
        if not template.exists():
            making = template.with_name("prefect-being-made")
            shutil.rmtree(making, ignore_errors=True)  # of a session that was killed
            subprocess.run(
                [sys.executable, "-c", MAKE_DATABASE],
                cwd=ROOT, env={**os.environ, **isolated(making)}, check=True, capture_output=True,
            )  # fmt: skip
            making.rename(template)
        with (
            closing(sqlite3.connect(template / "prefect.db")) as source,
            closing(sqlite3.connect(home / "prefect.db")) as copy,
        ):
            source.backup(copy)
    return home


def of_prepared(home: Path) -> dict[str, str]:
    """Environment variables of a server at a home that is `prepared`: it makes no migrations."""
    return {**isolated(home), **({} if ELSEWHERE in os.environ else HAS_DATABASE)}


@contextmanager
def running_server(home: Path) -> Iterator[PrefectServer]:
    """``prefect server start`` on a free port, its database under `home`.

    It ends with this process, SIGKILL included.
    """
    prepared(home)
    url = f"http://127.0.0.1:{free_port()}"
    server = PrefectServer(api_url=f"{url}/api", ui_url=url, home=home)
    with _prefect_process(
        ["server", "start", "--host", "127.0.0.1", "--port", url.rpartition(":")[2]],
        # The UI sends its requests to this address; by default to port 4200.
        {
            **of_prepared(home),
            "PREFECT_UI_API_URL": server.api_url,
        },
        home / "server.log",
        ready=lambda: _answers(f"{server.api_url}/health"),
        before=[sys.executable, process_reaper.__file__, str(os.getpid())],
    ):
        yield server


@contextmanager
def process_worker(
    server: PrefectServer, pool: str, variables: Mapping[str, str] | None = None
) -> Iterator[int]:
    """``prefect worker start --type process`` on `pool`, created if missing; its pid.

    Args:
        server: the server to poll, once a second.
        pool: name of the work pool.
        variables: more environment variables for the worker and the runs it starts.
    """

    def is_online() -> bool:
        with plain_client(STANDSTILL_SECONDS) as client:
            answer = client.post(f"{server.api_url}/work_pools/{pool}/workers/filter", json={})
        return answer.is_success and any(w["status"] == "ONLINE" for w in answer.json())

    with _prefect_process(
        ["worker", "start", "--pool", pool, "--type", "process", "--name", f"worker-of-{pool}"],
        {
            **server.environment,
            # The command of our work pools begins with `python`, which must be this one.
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            **(variables or {}),
        },
        server.home / f"worker-{pool}.log",
        ready=is_online,
    ) as pid:
        yield pid


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[PrefectServer]:
    """One real Prefect server for the whole test session."""
    with (
        tempfile.TemporaryDirectory(prefix="prefect-", ignore_cleanup_errors=True) as home,
        running_server(Path(home)) as server,
    ):
        yield server


def free_port() -> int:
    """A free TCP port of 127.0.0.1."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def _prefect_process(
    arguments: list[str],
    variables: Mapping[str, str],
    log_path: Path,
    ready: Callable[[], bool],
    before: Sequence[str] = (),
) -> Iterator[int]:
    """A Prefect CLI command that ends with the block, with all its child processes.

    Args:
        before: a command that runs it. Its standard input stays open for the block.
    """
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [*before, sys.executable, "-m", "prefect", "--no-prompt", *arguments],
            cwd=ROOT,
            env={**os.environ, **variables},
            stdin=subprocess.PIPE if before else subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        _wait_until(ready, process, log_path)
        yield process.pid
    finally:
        _end(process)


def _wait_until(
    ready: Callable[[], bool], process: subprocess.Popen[bytes], log_path: Path
) -> None:
    deadline = time.monotonic() + START_LIMIT_SECONDS
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(
                f"{process.args!r} was not ready within {START_LIMIT_SECONDS} s (exit code"
                f" {process.returncode}). Its log:\n{log_path.read_text()[-4000:]}"
            )
        time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    started = descendants(process.pid)
    process.terminate()
    try:
        process.wait(STOP_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid in wait_until_gone(started, STOP_LIMIT_SECONDS):
        os.kill(pid, signal.SIGKILL)
    if process.stdin is not None:
        process.stdin.close()


def _answers(url: str) -> bool:
    try:
        with plain_client() as client:
            return client.get(url).is_success
    except httpx.TransportError:
        return False
