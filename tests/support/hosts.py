"""Hosts of a small network on this machine: namespaces, each with separate addresses and folders.

The driver's host is this one, at `DRIVER`. The others see an empty folder in place of the
driver's, and only the loopback interface and the network between the hosts. Needs root, and
iproute2 and util-linux from the distribution.

Networks are made worse with a token bucket (tbf) and a packet filter (cls_bpf), not with netem,
which small kernels lack.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from trial_core.processes.nodes.node_provider import AGENT_MODULE

DRIVER = "10.77.0.1"
BRIDGE = "trialflow0"
LOCK = Path(tempfile.gettempdir(), "trialflow-hosts.lock")
"""Held by the one session of this machine that has such a network."""


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


class Hosts:
    """Hosts ``trialflow-1``, ``trialflow-2``, … at 10.77.0.11, 10.77.0.12, …

    Args:
        hidden: a folder of the driver's, in whose place each host has one of its own.
    """

    def __init__(self, hidden: Path) -> None:
        self._hidden = hidden
        self.agents: list[subprocess.Popen[bytes]] = []
        self.names: list[str] = []

    def add(self) -> str:
        """Make a host; returns its name."""
        number = len(self.names) + 1
        name, outside = f"trialflow-{number}", f"trialflow{number}"
        run("ip", "netns", "add", name)
        self.names.append(name)
        run("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "link", "set", outside, "master", BRIDGE, "up")
        for command in (
            ("address", "add", f"{self.address(name)}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            run("ip", "-n", name, *command)
        return name

    def address(self, name: str) -> str:
        """A host's address."""
        return f"10.77.0.{11 + self.names.index(name)}"

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
        run("ip", "link", "set", self._outside(name), "down")

    def slow_down(self, name: str, rate: str) -> None:
        """Let a host's cable carry only `rate` (``1mbit``) each way, after a queue of 400 ms."""
        for tc, device in self._ends(name):
            limit = ("rate", rate, "burst", "4kb", "latency", "400ms")
            run(*tc, "qdisc", "add", "dev", device, "root", "tbf", *limit)

    def lose_packets(self, name: str, share: float) -> None:
        """Lose this share of the packets of a host, each way, at random."""
        # Load a random number; jump if it is at least the limit; drop; or else pass.
        limit = round(share * 2**32)
        program = f"4,32 0 0 4294963256,53 1 0 {limit},6 0 0 2,6 0 0 4294967295"
        for tc, device in self._ends(name):
            run(*tc, "qdisc", "add", "dev", device, "clsact")
            packets = ("filter", "add", "dev", device, "egress", "bpf", "direct-action")
            run(*tc, *packets, "bytecode", program)

    def packets(self, name: str, kind: str, what: str) -> list[int]:
        """A count of packets from a host and to it: ``tbf overlimits`` had to wait, for example."""
        return [
            queue[what]
            for tc, device in self._ends(name)
            for queue in json.loads(run(*tc, "-s", "-j", "qdisc", "show", "dev", device))
            if queue["kind"] == kind
        ]

    def _ends(self, name: str) -> list[tuple[tuple[str, ...], str]]:
        """The command and interface for what a host sends, and for what it gets."""
        return [(("tc", "-n", name), "eth0"), (("tc",), self._outside(name))]

    def _outside(self, name: str) -> str:
        return f"trialflow{self.names.index(name) + 1}"

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


def delete_hosts() -> None:
    """Delete all hosts with their processes, also those of a session that was killed."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    names = [line.split()[0] for line in listed.stdout.splitlines() if line]
    for name in filter(lambda name: name.startswith("trialflow-"), names):
        # Now, not when the last process ends.
        _try("ip", "link", "delete", name.replace("-", ""))
        for pid in _try("ip", "netns", "pids", name).split():
            _try("kill", "-KILL", pid)
        _try("ip", "netns", "delete", name)
    _try("ip", "link", "delete", BRIDGE)


def _try(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


@contextmanager
def new_hosts(hidden: Path) -> Iterator[Hosts]:
    """A network without hosts. Skips the test where it cannot be made."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "unshare"))):
        pytest.skip("needs root, iproute2 and util-linux, to make network namespaces")
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        delete_hosts()
        hosts = Hosts(hidden)
        try:
            run("ip", "link", "add", BRIDGE, "type", "bridge")
            run("ip", "address", "add", f"{DRIVER}/24", "dev", BRIDGE)
            run("ip", "link", "set", BRIDGE, "up")
            yield hosts
        finally:
            for agent in hosts.agents:
                agent.kill()
                agent.wait()
            delete_hosts()
