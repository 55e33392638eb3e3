"""`trialflow up`: a server, a worker and the deployments, which end with the command."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient

from tests.support.cli import TRIALFLOW, environment_in, trialflow, trialflow_here
from tests.support.prefect import STANDSTILL_SECONDS, isolated, prepared
from tests.support.processes import descendants, wait_until_gone
from tests.support.slots import lines, toy_config
from tests.support.waiting import WAIT_SECONDS, retry_while_busy, until
from trial_core.checkpoint.store import CheckpointStore
from trialflow.deployments import process_reaper
from trialflow.deployments.cli import up as up_command
from trialflow.deployments.resources import lease_problem
from trialflow.deployments.retraining import RetrainingRequest
from trialflow.flows.server import prefect_server
from trialflow.flows.server.prefect_server import SCRIPT
from trialflow.flows.server.server_login import ServerLogin

ENDLESS = 10**6


@dataclass
class Up:
    """A `trialflow up` that is ready."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str
    password_path: Path

    def client(self) -> httpx.Client:
        """A client of the API that is logged in."""
        user, _, password = self.password_path.read_text().strip().partition(":")
        login = (user, password)
        return httpx.Client(base_url=f"{self.url}/api", auth=login, timeout=STANDSTILL_SECONDS)

    def get(self, path: str) -> Any:
        """The API's answer to a GET request."""
        with self.client() as client:
            return client.get(path).raise_for_status().json()

    def query(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The API's answer to a POST request."""
        with self.client() as client:
            answer = retry_while_busy(lambda: client.post(path, json=body or {}).raise_for_status())
            return answer.json()

    def answers(self) -> bool:
        """Whether the server answers."""
        try:
            return bool(self.get("health"))
        except httpx.HTTPError:
            return False

    def stop(self, number: int) -> None:
        """Send a signal, and wait until no process is left."""
        started = descendants(self.process.pid)
        self.process.send_signal(number)
        self.process.wait(WAIT_SECONDS)
        assert wait_until_gone(started, 10) == []


@contextmanager
def up(folder: Path, port: int, *files: str) -> Iterator[Up]:
    """`trialflow up` in `folder`; killed at the end if it still runs."""
    home = prepared(folder / "prefect")
    log = folder / "up.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*TRIALFLOW, "up", *files, "--port", str(port)],
            cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            env=environment_in(folder, isolated(home)),
        )  # fmt: skip
    try:
        until(lambda: b"Ctrl-C stops" in log.read_bytes() or process.poll() is not None, "up")
        found = re.search(r"UI +(http://\S+)", log.read_text())
        assert found is not None, log.read_text()
        password = re.search(r"password +(\S+)", log.read_text())
        assert password is not None, log.read_text()
        yield Up(process, log, found[1], Path(password[1]))
    finally:
        if process.poll() is None:
            started = descendants(process.pid)
            process.kill()
            process.wait()
            for pid in wait_until_gone(started, 15):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.long
def test_a_configured_server_is_refused(tmp_path: Path) -> None:
    """`up` starts its own server. The error names the configured one, and what to do instead."""
    variables = {"PREFECT_API_URL": "http://elsewhere:4200/api"}
    done = trialflow(tmp_path, "up", variables=variables)
    assert done.returncode == 2
    assert "http://elsewhere:4200/api" in done.stderr
    assert "trialflow deploy" in done.stderr


@pytest.mark.server
def test_everything_starts_and_ends_with_the_command(tmp_path: Path) -> None:
    """UI, deployments, a worker and persistent leases, on another port if that one is taken. A
    second `up` is refused. 10 s after SIGKILL no process is left."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with up(tmp_path, port) as running:
            assert f"(port {port} is taken)" in running.log.read_text()
            assert "<html" in httpx.get(running.url, follow_redirects=True).text.lower()
            names = {each["name"] for each in running.query("deployments/filter")}
            assert names == {"train", "evaluate", "search", "prune", "retrain"}
            settings = running.get("admin/settings")["server"]
            assert settings["events"]["expired_bucket_buffer"] in ("P30D", 30 * 24 * 3600.0)
            password = running.password_path.read_text().strip()
            with SyncPrefectClient(f"{running.url}/api", auth_string=password) as client:
                assert lease_problem(client) is None
            second = trialflow_here(tmp_path, "up", variables=isolated(tmp_path / "prefect"))
            assert second.returncode == 2
            holder = f"process {running.process.pid}, at {running.url}/api (password: in "
            assert f"{holder}{running.password_path}). Use that" in second.stderr
            workers = "work_pools/local/workers/filter"
            until(lambda: [w["status"] for w in running.query(workers)] == ["ONLINE"], "a worker")
            # The worker and its runs do not keep the port.
            processes = map(psutil.Process, descendants(running.process.pid))
            holders = [each for each in processes if port_of(running) in listening_ports(each)]
            assert [each.cmdline()[1] for each in holders] == [SCRIPT]
            assert port_of(running) in listening_ports(psutil.Process(running.process.pid))
            running.stop(signal.SIGKILL)


def port_of(running: Up) -> int | None:
    """The port of its server."""
    return httpx.URL(running.url).port


def listening_ports(process: psutil.Process) -> list[int]:
    """The ports that the process listens on, also by sockets that it has inherited."""
    connections = process.net_connections("tcp4")
    return [each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN]


def test_a_server_that_ends_while_the_deployments_are_set_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started again: requests wait for it, for minutes if it did not return."""
    is_back = threading.Event()
    ended = SimpleNamespace(
        api_url="http://127.0.0.1:4200/api", login=ServerLogin("me:secret", tmp_path),
        has_ended=True, restart=is_back.set, refuse_connections=lambda: None,
    )  # fmt: skip

    def set_up(pool: str | None, retrainings: Sequence[RetrainingRequest]) -> str:
        assert is_back.wait(WAIT_SECONDS)
        raise KeyboardInterrupt

    monkeypatch.setattr(prefect_server, "RESTART_POLL_SECONDS", 0.001)
    monkeypatch.setattr(prefect_server, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(prefect_server, "local_server", lambda *arguments: nullcontext(ended))
    monkeypatch.setattr(up_command, "_set_up", set_up)
    with pytest.raises(KeyboardInterrupt):
        up_command._serve(4200, None, (), tmp_path, 1.0, False)


@pytest.mark.long  # test_request_guard has the guard and the password
@pytest.mark.server
def test_only_this_user_reaches_the_server(tmp_path: Path) -> None:
    """Other users and pages of other sites are refused. The printed lines let Prefect's own
    commands in, and the address alone lets trialflow's in. No log has the password."""
    with up(tmp_path, 0) as running:
        filter_url = f"{running.url}/api/deployments/filter"
        assert httpx.post(filter_url, json={}).status_code == 401
        with running.client() as client:
            for headers in ({"Origin": "http://site.example"}, {"Host": "site.example"}):
                refused = client.post("deployments/filter", json={}, headers=headers)
                assert refused.status_code == 403
        assert running.password_path.stat().st_mode & 0o777 == 0o600
        password = running.password_path.read_text().strip()
        for log in (running.log, *(tmp_path / "prefect").glob("*.log")):
            assert password not in log.read_text()
        for pid in descendants(running.process.pid):
            assert password not in " ".join(psutil.Process(pid).cmdline())

        home = isolated(tmp_path / "prefect")
        variables = re.findall(r"^  (PREFECT_API_.+\\\n)", running.log.read_text(), re.MULTILINE)
        listed = subprocess.run(
            ["bash", "-ec", f"{''.join(variables)} {sys.executable} -m prefect deployment ls"],
            env=environment_in(tmp_path, home), text=True, capture_output=True, check=False,
        )  # fmt: skip
        assert "train/train" in listed.stdout, listed.stderr
        address = {**home, "PREFECT_API_URL": f"{running.url}/api"}
        deployed = trialflow(tmp_path, "deploy", "--dry-run", variables=address)
        assert deployed.returncode == 0, deployed.stderr
        running.stop(signal.SIGTERM)
        assert not running.password_path.exists()


@pytest.mark.long
@pytest.mark.server
@pytest.mark.slots
def test_runs_save_and_resume_with_the_next_up(tmp_path: Path) -> None:
    """A killed server and a killed worker are started again, while the run continues. After Ctrl-C
    the run saves, and no process is left. The next `up` resumes the same run, and does so after
    SIGKILL."""
    config = toy_config(
        tmp_path, ENDLESS, scheduling_unit=ENDLESS, hyperparameters={"record": str(tmp_path)},
        max_restarts=1,
    )  # fmt: skip
    store = CheckpointStore(config.checkpoint_storage.url)

    def seen() -> list[int]:
        return [line[0] for line in lines(tmp_path, "samples", 0)]

    with up(tmp_path, 0) as running:
        deployment = running.get("deployments/name/train/train")
        parameters = {"config": json.loads(config.model_dump_json())}
        path = f"deployments/{deployment['id']}/create_flow_run"
        run_id = running.query(path, {"parameters": parameters})["id"]
        until(lambda: len(seen()) > 5, "training")
        (server,) = [
            pid
            for pid in descendants(running.process.pid)
            if SCRIPT in psutil.Process(pid).cmdline()
        ]
        os.kill(server, signal.SIGKILL)
        at_kill = len(seen())
        until(running.answers, "the server")
        until(lambda: len(seen()) > at_kill + 5, "training")
        (reaper,) = (
            each
            for each in map(psutil.Process, descendants(running.process.pid))
            if process_reaper.__file__ in each.cmdline()
        )
        (worker,) = reaper.children()
        worker.kill()
        until(lambda: "it was ended by SIGKILL" in running.log.read_text(), "the news")
        until(lambda: any("worker" in each.cmdline() for each in reaper.children()), "a worker")
        at_kill = len(seen())
        until(lambda: len(seen()) > at_kill + 5, "training")
        running.stop(signal.SIGINT)
        assert running.process.returncode == 130
    saved = store.list()[-1].progress.batches_trained
    assert saved == len(seen()) > 5
    with up(tmp_path, 0) as running:
        until(lambda: len(seen()) > saved + 5, "training again", 400)
        assert seen()[: saved + 5] == list(range(saved + 5))
        (run,) = running.query("flow_runs/filter")
        assert (run["id"], run["state_name"]) == (run_id, "Running")
        running.stop(signal.SIGKILL)
    with up(tmp_path, 0) as running:
        assert f"{run['name']}: it was Running and had no process" in running.log.read_text()
        until(lambda: seen().count(saved) == 2, "training again", 400)
        running.stop(signal.SIGTERM)
