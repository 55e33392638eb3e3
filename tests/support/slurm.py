"""A real Slurm on this machine: `slurmctld`, and three nodes that are a `slurmd -N` each.

It needs Debian's packages of `INSTALL_COMMAND`, and neither munge, nor cgroups, nor a database.
Without them these tests are skipped; TRIALFLOW_TEST_SLURM=require (as in CI) fails them.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from getpass import getuser
from pathlib import Path

import psutil
import pytest

from tests.support.processes import kill, wait_until_gone
from tests.support.waiting import until

PROGRAMS = ("slurmctld", "slurmd", "srun", "scontrol")
INSTALL_COMMAND = "apt-get install slurmctld slurmd slurm-client"
GPUS = {"node1": 1, "node2": 2, "node3": 2}
"""The nodes, and how many GPUs Slurm believes that they have."""

SECONDS = 60.0
PORTS = range(21000, 31000)
"""Below those that Linux gives to outgoing connections."""

SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
ReturnToService=1
SlurmdParameters=config_overrides
SlurmdTimeout=6
AuthInfo=cred_expire=5
KillWait=2
MessageTimeout=5
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A running Slurm.

    Attributes:
        environment: the variables with which Slurm's commands reach it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._slurmds: dict[str, subprocess.Popen[bytes]] = {}
        outside = {name: text for name, text in os.environ.items() if not name.startswith("SLURM_")}
        self.environment = {**outside, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        """Start it, and wait until all nodes are idle."""
        ports = _free_ports(1 + len(GPUS))
        host = socket.gethostname()
        conf = SLURM_CONF.format(host=host, port=ports.pop(), user=getuser(), folder=self._folder)
        (self._folder / "state").mkdir()
        devices = ["AutoDetect=off"]
        for name, gpus in GPUS.items():
            (self._folder / f"spool-{name}").mkdir()
            conf += (
                f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports.pop()} "
                f"CPUs=4 Gres=gpu:{gpus}\n"
            )
            for gpu in range(gpus):
                (self._folder / f"gpu{gpu}").touch()
                devices.append(f"NodeName={name} Name=gpu File={self._folder}/gpu{gpu}")
        (self._folder / "slurm.conf").write_text(conf)
        (self._folder / "gres.conf").write_text("\n".join(devices) + "\n")
        self._daemon("slurmctld", "-D")
        for name in GPUS:
            self.start_node(name)
        self.wait_until_idle()

    def stop(self) -> None:
        """End all its processes, those of jobs included."""
        ours = [each.pid for each in psutil.process_iter() if self._is_ours(each)]
        kill(ours)
        wait_until_gone(ours, 30)

    def command(self, *command: str) -> str:
        """What a command of Slurm prints, errors included."""
        done = subprocess.run(
            command, env=self.environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            timeout=SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}"
        return done.stdout

    @contextmanager
    def allocation(self, *options: str) -> Iterator[dict[str, str]]:
        """An allocation, given back at the end of the block: the variables of its processes.

        Before, it waits until all nodes are idle.
        """
        self.wait_until_idle()
        granted = self.command("salloc", "--no-shell", "--no-kill", *options)
        job = re.findall(r"Granted job allocation (\d+)", granted)[0]
        try:
            yield {**self.environment, "SLURM_JOB_ID": job}
        finally:
            self.command("scancel", job)
            until(lambda: not self.command("squeue", "-h"), "the job has ended")

    def steps(self, environment: Mapping[str, str]) -> list[str]:
        """The steps that run in an allocation."""
        return self.command("squeue", "-h", "-s", "-j", environment["SLURM_JOB_ID"]).splitlines()

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node."""
        self._slurmds[name] = self._daemon("slurmd", "-D", "-N", name)

    def wait_until_idle(self) -> None:
        """Wait until all nodes are idle; those that are down or drained may be used again."""
        for name in GPUS:
            if re.search("DOWN|DRAIN", self.state(name)):
                self.command("scontrol", "update", f"nodename={name}", "state=resume")
            until(
                lambda name=name: self.state(name) == "IDLE", f"{name} is idle", SECONDS,
                lambda name=name: self.state(name),
            )  # fmt: skip

    def kill_node(self, name: str) -> None:
        """SIGKILL the slurmd of a node."""
        self._slurmds[name].send_signal(signal.SIGKILL)
        self._slurmds[name].wait()

    def drain_node(self, name: str) -> None:
        """As an administrator does before maintenance."""
        self.command("scontrol", "update", f"nodename={name}", "state=drain", "reason=test")

    def state(self, name: str) -> str:
        """Of a node, as in ``ALLOCATED``; empty while slurmctld does not answer."""
        shown = subprocess.run(
            ["scontrol", "show", "node", name, "-o"],
            env=self.environment, capture_output=True, text=True, check=False,
        ).stdout  # fmt: skip
        return "".join(re.findall(r" State=(\S+)", shown))

    def _daemon(self, *command: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{command[-1]}.out").open("ab") as output:
            return subprocess.Popen(
                command, env=self.environment, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip

    def _is_ours(self, process: psutil.Process) -> bool:
        """Whether a process has its `SLURM_CONF`, or, as slurmstepd, one of its logs open."""
        try:
            return process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"] or any(
                file.path.startswith(str(self._folder)) for file in process.open_files()
            )
        except psutil.Error:
            return False


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        found: list[int] = []
        for port in PORTS:
            try:
                stack.enter_context(socket.create_server(("", port)))
            except OSError:
                continue
            found.append(port)
            if len(found) == count:
                break
        return found


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """A Slurm of three idle nodes."""
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        reason = f"not installed: {', '.join(missing)}; to run this test: {INSTALL_COMMAND}"
        if os.environ.get("TRIALFLOW_TEST_SLURM") == "require":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        running = Slurm(Path(folder))
        try:
            running.start()
            yield running
        finally:
            running.stop()
