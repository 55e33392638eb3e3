"""A real Ray cluster on this machine, as a context manager and a pytest fixture."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.processes import descendants, kill, wait_until_gone

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("scripts") / "ray_cluster.py"
TOKEN = "a-token-of-the-ray-cluster-under-test"


@dataclass
class RayCluster:
    """A running cluster. The first node is its head, which drivers on this machine use.

    Attributes:
        environment: what a client needs.
        raylets: the process of each node, by Ray's id of the node.
    """

    process: subprocess.Popen[str]
    environment: Mapping[str, str]
    address: str = ""
    raylets: dict[str, int] = field(default_factory=dict)

    def read_until(self, count: int) -> None:
        """Read what the cluster's process prints, until there are so many nodes."""
        while len(self.raylets) < count:
            node, raylet = self._line().split()
            self.raylets[node] = int(raylet)

    def read_address(self) -> None:
        self.address = self._line()

    def add(self, cores: int) -> str:
        """Start another node, and return its id."""
        known = set(self.raylets)
        print(cores, file=self.process.stdin, flush=True)
        self.read_until(len(known) + 1)
        return next(iter(set(self.raylets) - known))

    def kill(self, node: str) -> None:
        """End a node's raylet by SIGKILL."""
        os.kill(self.raylets[node], signal.SIGKILL)

    def end(self, node: str) -> None:
        """End a node, which may have been killed, in order."""
        raylet = self.raylets.pop(node)
        kill([raylet], signal.SIGTERM)
        wait_until_gone([raylet], 30)

    def drain(self, node: str) -> None:
        """Tell Ray that a node will be taken away in ten minutes, as a cloud does for spot ones."""
        subprocess.run(
            [
                str(Path(sys.executable).with_name("ray")), "drain-node", "--node-id", node,
                "--address", self.address, "--reason", "DRAIN_NODE_REASON_PREEMPTION",
                "--reason-message", "a test", "--deadline-remaining-seconds", "600",
            ],
            env={**os.environ, **self.environment}, capture_output=True, check=True,
        )  # fmt: skip

    def _line(self) -> str:
        line = (self.process.stdout or sys.stdin).readline().strip()
        if not line:
            raise RuntimeError("the Ray cluster did not start; its errors are above")
        return line


@contextlib.contextmanager
def started_ray_cluster(
    *cores: int, mode: str = "token", client_port: int = 0
) -> Iterator[RayCluster]:
    """Start a cluster with a node for each of `cores`; ends it, and removes its files."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: for the paths of sockets
    client = {"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": TOKEN} if mode == "token" else {}
    environment = {
        **os.environ, "RAY_AUTH_MODE": mode, **client, "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT), "TRIALFLOW_HOME": folder,
        # A process that serves a client may take long to start on a busy machine.
        "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "150",
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *map(str, (client_port, *cores))],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    cluster = RayCluster(process, {"RAY_AUTH_MODE": mode, **client})
    try:
        cluster.read_until(len(cores))
        cluster.read_address()
        yield cluster
    finally:
        children = descendants(process.pid)
        process.communicate()
        left = wait_until_gone(children, 30)
        shutil.rmtree(folder, ignore_errors=True)
        assert not left, f"processes of the Ray cluster are left: {left}"


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """A head without cores, and two nodes with two each. This process is a client."""
    with started_ray_cluster(0, 2, 2) as cluster, pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        yield cluster
