"""A Prefect server on PostgreSQL: `trialflow deploy`, a worker, a run."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.deployments.test_deploy import ALL
from tests.support.cli import trialflow
from tests.support.prefect import free_port, process_worker, running_server
from tests.support.slots import lines, toy_config

pytestmark = [pytest.mark.long, pytest.mark.server, pytest.mark.slots]

PATIENCE_SECONDS = 120.0
USER, DATABASE = "prefect", "prefect"


def programs() -> Path:
    """The folder of PostgreSQL's programs; without them the test is skipped.

    With TRIALFLOW_TEST_POSTGRESQL=require it fails instead.
    """
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found and (here := shutil.which("initdb")):
        found = [Path(here)]
    if found:
        return found[-1].parent
    if os.environ.get("TRIALFLOW_TEST_POSTGRESQL") == "require":
        pytest.fail("initdb not found: apt-get install postgresql")
    pytest.skip("initdb not found: apt-get install postgresql")


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """A new database on a free port; its address, as a Prefect setting."""
    bin_, port = programs(), free_port()
    # PostgreSQL refuses to run as root.
    user = "postgres" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
    data, log = folder / "data", folder / "log"
    data.mkdir(mode=0o700)
    shutil.chown(data, user)
    shutil.chown(folder, user)
    subprocess.run(
        [bin_ / "initdb", "-D", data, "-U", USER, "-A", "trust", "--no-sync"],
        user=user, cwd=folder, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    with log.open("wb") as output:
        server = subprocess.Popen(
            [bin_ / "postgres", "-D", data, "-h", "127.0.0.1", "-p", str(port), "-k", folder, "-F"],
            user=user, cwd=folder, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        create = [bin_ / "createdb", "-h", "127.0.0.1", "-p", str(port), "-U", USER, DATABASE]
        while subprocess.run(create, capture_output=True, check=False).returncode:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield f"postgresql+asyncpg://{USER}@127.0.0.1:{port}/{DATABASE}"
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(PATIENCE_SECONDS)


def test_a_team_on_postgresql(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first deploy creates everything, the second changes nothing, and a run completes."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with (
        tempfile.TemporaryDirectory(prefix="postgresql-", ignore_cleanup_errors=True) as folder,
        cluster(Path(folder)) as address,
        monkeypatch.context() as patched,
    ):
        patched.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", address)
        with running_server(tmp_path) as server:
            for verb in ("created", "unchanged"):
                done = trialflow(
                    tmp_path, "deploy", "--pool", "deployed", "--gpus", "4",
                    variables=server.environment,
                )  # fmt: skip
                assert done.returncode == 0, done.stderr
                assert done.stdout.splitlines()[: len(ALL)] == [f"{verb}: {each}" for each in ALL]
            config = toy_config(tmp_path, 4, hyperparameters={"record": str(tmp_path)})
            deployment = server.query("deployments/name/train/train")
            run = server.query(
                f"deployments/{deployment['id']}/create_flow_run",
                {"parameters": {"config": config.model_dump(mode="json")}},
            )
            home = {"TRIALFLOW_HOME": str(tmp_path / "home")}
            with process_worker(server, "deployed", home):
                deadline = time.monotonic() + PATIENCE_SECONDS
                while (now := server.query(f"flow_runs/{run['id']}"))["state_type"] != "COMPLETED":
                    assert time.monotonic() < deadline, now["state"]
                    time.sleep(0.5)
            assert [line[0] for line in lines(tmp_path, "samples", 0)] == list(range(4))
        assert not list(tmp_path.glob("*.db"))
