"""Hosts of a small network on this machine: namespaces, each with separate addresses and folders.

The driver's host is this one, at `Hosts.DRIVER`. The others see an empty folder in place of the
driver's, and only the loopback interface and the network between the hosts. Needs root, and
iproute2 and util-linux from the distribution.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from trial_core.nodes.engine import AGENT_MODULE

DRIVER = "10.77.0.1"
BRIDGE = "trialflow0"


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"


class Hosts:
    """Hosts ``trialflow-1``, ``trialflow-2``, … at 10.77.0.11, 10.77.0.12, …

    Args:
        hidden: a folder of the driver's, which the hosts see empty.
    """

    def __init__(self, hidden: Path) -> None:
        self._hidden = hidden
        self.agents: list[subprocess.Popen[bytes]] = []
        self.names: list[str] = []
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        run("ip", "address", "add", f"{DRIVER}/24", "dev", BRIDGE)
        run("ip", "link", "set", BRIDGE, "up")

    def add(self) -> str:
        """Make a host; returns its name."""
        number = len(self.names) + 1
        name, outside = f"trialflow-{number}", f"trialflow{number}"
        run("ip", "netns", "add", name)
        self.names.append(name)
        run("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "link", "set", outside, "master", BRIDGE, "up")
        for command in (
            ("address", "add", f"10.77.0.{10 + number}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            run("ip", "-n", name, *command)
        return name

    def start_agent(self, name: str, address: str, token: str, folder: Path) -> None:
        """Start a host's agent; its own files are in `folder`, which the driver sees, too."""
        folder.mkdir(parents=True)
        token_file = folder / "token"
        token_file.write_text(token)
        hide = 'mount -t tmpfs none "$0" && mkdir -p "$1" && exec "${@:2}"'
        with (folder / "agent.log").open("wb") as log:
            agent = subprocess.Popen(
                [
                    "ip", "netns", "exec", name, "unshare", "--mount",
                    "bash", "-c", hide, str(self._hidden), str(self._hidden / "home"),
                    sys.executable, "-m", AGENT_MODULE, "--driver", address,
                ],
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, cwd="/",
                env={
                    **os.environ,
                    "TRIALFLOW_HOME": str(self._hidden / "home"),
                    "DS_ACCELERATOR": "cpu",
                    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                },
            )  # fmt: skip
        assert agent.stdin is not None
        agent.stdin.write(token.encode())
        agent.stdin.close()
        self.agents.append(agent)

    def cut(self, name: str) -> None:
        """Cut a host's cable."""
        run("ip", "link", "set", f"trialflow{self.names.index(name) + 1}", "down")

    def degrade(self, name: str, *how: str) -> None:
        """Make a host's network worse: ``delay 20ms``, ``loss 5%``."""
        run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "netem", *how)

    def ranks(self, name: str) -> list[int]:
        """The ranks that run on a host."""
        done = subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True, check=True
        )
        found = []
        for pid in done.stdout.split():
            with contextlib.suppress(psutil.Error):
                if "trialflow: rank" in " ".join(psutil.Process(int(pid)).cmdline()):
                    found.append(int(pid))
        return found

    def close(self) -> None:
        """End the agents and delete the hosts."""
        for agent in self.agents:
            agent.kill()
            agent.wait()
        for number, name in enumerate(self.names, 1):
            run("ip", "link", "delete", f"trialflow{number}")  # now, not when the last process ends
            for pid in subprocess.run(
                ["ip", "netns", "pids", name], capture_output=True, text=True, check=True
            ).stdout.split():
                subprocess.run(["kill", "-KILL", pid], check=False)
            run("ip", "netns", "delete", name)
        run("ip", "link", "delete", BRIDGE)


@contextmanager
def new_hosts(hidden: Path) -> Iterator[Hosts]:
    """A network without hosts. Skips the test where it cannot be made."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("needs root, iproute2 and util-linux, to make network namespaces")
    subprocess.run(["ip", "link", "delete", BRIDGE], capture_output=True, check=False)
    hosts = Hosts(hidden)
    try:
        yield hosts
    finally:
        hosts.close()
