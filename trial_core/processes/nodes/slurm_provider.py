"""Nodes of a Slurm allocation (``sbatch``, ``salloc``): ``srun`` starts an agent on each.

Slurm has already given the machines, so `acquire` only chooses among them, and `offer` has the
nodes that it left over. Each agent is one step of the job. An ``srun`` that gets SIGTERM kills its
step, and a step does not outlive its ``srun``.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import IO, Generic, TypeVar

from trial_core.common.text_format import clean, plural
from trial_core.errors import LaunchError
from trial_core.processes.machine.accelerators import CPU_SLOTS
from trial_core.processes.machine.background import in_background
from trial_core.processes.nodes.node_provider import (
    AgentEnded,
    Gang,
    GangEvent,
    Node,
    NodeDraining,
    NodeProvider,
    NodeRequest,
)

T = TypeVar("T")

JOB_VARIABLE = "SLURM_JOB_ID"
KEPT_VARIABLES = ("SLURM_CONF", "SLURM_JWT")
"""How ``srun`` reaches Slurm. Its other variables would give the step the shape of the job's
tasks, and contradict the options below."""

STEP_OPTIONS = (
    "--nodes=1", "--ntasks=1", "--overlap",  # all CPUs that the job has on the node
    "--mem=0",  # all of the job's memory there
    "--cpu-bind=none", "--gpu-bind=none", "--mpi=none", "--export=ALL", "--unbuffered",
    "--no-kill",
)  # fmt: skip

STEP = r"""
exec 3<&0
read -r token <&3
printf '%s\n' "$token" | "$@" 3<&- &
srun=$!
{ read -r end <&3; kill "$srun"; } &
watch=$!
wait "$srun"
code=$?
kill "$watch" 2>/dev/null
exit "$code"
"""
"""Runs ``srun`` until its stdin, a pipe of the driver, ends, even if the driver is killed.

Linux could signal ``srun`` at its parent's death, but would do so when the thread that started it
ends. The token goes through the shell's own commands, and so into no list of processes.
"""

QUERY_SECONDS = 5.0
"""How long after an answer to ask Slurm again for the state of the nodes."""

OFFER_SECONDS = 2.0
"""The same for more nodes."""

ANSWER_SECONDS = 30.0
"""How long a command of Slurm may take; more than Slurm's own limit, MessageTimeout, 10 s."""
FRESH_SECONDS = 10.0
"""Older answers are not used, since the run may not have looked at its nodes for long."""
END_SECONDS = 15.0
"""``srun`` takes up to 12 s to give up a step that it cannot reach."""

POLL_SECONDS = 1.0
TAIL_LINES = 10
TAIL_BYTES = 4096

LOST_STATES = {"DOWN", "NOT_RESPONDING", "ERROR", "FAIL", "POWERED_DOWN", "POWERING_DOWN"}
BAD_STATES = LOST_STATES | {"DRAIN", "UNKNOWN", "FUTURE", "REBOOT_ISSUED"}
"""A node with such a state is not chosen."""
DRAIN_STATES = {"DRAIN", "DRAINING", "DRAINED"}
"""Slurm lets such a node's jobs end."""


def in_allocation(environment: Mapping[str, str]) -> bool:
    return bool(environment.get(JOB_VARIABLE))


@dataclass(frozen=True)
class _Host:
    """A machine of the allocation.

    Attributes:
        gpus: how many GPUs the job has asked for and has there.
        problem: such as ``DOWN+NOT_RESPONDING``; empty if it works.
    """

    name: str
    gpus: int
    problem: str

    def slots(self, request: NodeRequest, on_cpu: bool) -> int:
        if on_cpu:
            return request.slots_per_node or CPU_SLOTS
        wanted = request.slots_per_node or self.gpus
        return wanted if wanted <= self.gpus else 0


class SlurmProvider(NodeProvider):
    """Places a run's nodes in the Slurm allocation that this process runs in.

    The agents get `environment`, the variables of this process.
    """

    name = "slurm"

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment

    def acquire(
        self, request: NodeRequest, seconds: float, should_abort: Callable[[], bool]
    ) -> Gang:
        """Take the first nodes that work and together have enough slots."""
        if not in_allocation(self._environment):
            raise LaunchError(
                f"resources.engine: slurm needs a Slurm allocation, but {JOB_VARIABLE} is not set: "
                "start this command with sbatch or salloc (deployments/slurm/train.sbatch is a "
                "script to copy)"
            )
        slurm = _Slurm(self._environment)
        deadline = time.monotonic() + seconds
        while True:
            try:
                hosts = slurm.hosts()
                break
            except _NoAnswerError as error:
                if time.monotonic() > deadline or should_abort():
                    raise LaunchError(
                        f"Slurm does not tell what job {slurm.job} has: {error}; try scontrol show "
                        f"job {slurm.job}"
                    ) from error
            time.sleep(POLL_SECONDS)
        on_cpu = request.on_cpu or not any(host.gpus for host in hosts)

        def describe(host: _Host) -> str:
            gpus = "" if on_cpu else f" of {plural(host.gpus, 'GPU')}"
            return f"{host.name}: {host.problem or f'{host.slots(request, on_cpu)}{gpus}'}"

        chosen: dict[Node, _Host] = {}
        for host in hosts:
            slots = 0 if host.problem else host.slots(request, on_cpu)
            if slots and sum(node.slots for node in chosen) < request.slots:
                chosen[Node(host.name, slots)] = host
        if (found := sum(node.slots for node in chosen)) < request.min_slots:
            raise LaunchError(
                f"the run needs {plural(request.min_slots, 'slot')}, but the nodes of Slurm job "
                f"{slurm.job} have {found} ({', '.join(map(describe, hosts))}); ask sbatch "
                "or salloc for more nodes or GPUs, or reduce resources.slots_per_trial"
            )
        return _SlurmGang(slurm, request, on_cpu, chosen)


class _NoAnswerError(Exception):
    """A Slurm command has failed, or has not answered in time."""


class _Slurm:
    """Slurm's information about this process's job. Raises _NoAnswerError if there is none."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.job = environment[JOB_VARIABLE]
        self.environment = {
            name: value
            for name, value in environment.items()
            if name in KEPT_VARIABLES or not name.startswith(("SLURM_", "SRUN_"))
        }

    def hosts(self) -> list[_Host]:
        """The machines that the job has now, without machines that Slurm has taken from it."""
        job = self._ask("show", "job", "-d", "-o", self.job)
        # Without such a field, an exclusive job is shown GPUs that its steps cannot have.
        has_gpus = re.search(r" TresPer\w+=\S*gpu", job) is not None
        gpus: dict[str, int] = {}
        # Nodes=node[2-3] CPU_IDs=0-15 Mem=0 GRES=gpu:a100:2(IDX:0-1),gpu:h100:1(IDX:2)
        for nodes, devices in re.findall(r" Nodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)", job):
            count = sum(map(int, re.findall(r"\bgpu:(?:[^:,()]+:)?(\d+)", devices)))
            names = self._ask("show", "hostnames", nodes).split()
            gpus.update(dict.fromkeys(names, count if has_gpus else 0))
        states = self.states(gpus) if gpus else {}
        return [
            _Host(name, count, _problem(states.get(name, "UNKNOWN"), BAD_STATES))
            for name, count in gpus.items()
        ]

    def states(self, names: Iterable[str]) -> dict[str, str]:
        """The state of each node, such as ``ALLOCATED+DRAIN``."""
        shown = self._ask("show", "node", ",".join(names), "-o")
        return dict(re.findall(r"^NodeName=(\S+) .*? State=(\S+)", shown, flags=re.MULTILINE))

    def _ask(self, *arguments: str) -> str:
        try:
            done = subprocess.run(
                ["scontrol", *arguments],
                env=self.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=ANSWER_SECONDS, check=True,
            )  # fmt: skip
        except subprocess.CalledProcessError as error:
            raise _NoAnswerError(clean(error.stderr).strip()) from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _NoAnswerError(str(error)) from error
        return done.stdout


def _problem(state: str, bad: set[str]) -> str:
    """The state, if it is one of the bad ones, else empty. Older Slurm writes DOWN*."""
    names = set(state.replace("*", "+NOT_RESPONDING").split("+"))
    return state if names & bad else ""


class _Question(Generic[T]):
    """A repeated question to Slurm, in another thread, since an answer may take long."""

    def __init__(self, every_seconds: float) -> None:
        self._every_seconds = every_seconds
        self._ask_at = 0.0
        self._asked: Future[tuple[T, float]] | None = None

    def forget(self) -> None:
        """Drop the answer to come, as the question no longer holds."""
        self._asked, self._ask_at = None, 0.0

    def answer(self, ask: Callable[[], T]) -> T | None:
        """The answer that has come since the last call, or None. Returns at once."""
        now = time.monotonic()
        if self._asked is None and now >= self._ask_at:
            self._asked = in_background(lambda: (ask(), time.monotonic()), "slurm")
        if self._asked is None or not self._asked.done():
            return None
        asked, self._asked = self._asked, None
        self._ask_at = now + self._every_seconds
        try:
            answer, answered_at = asked.result()
        except _NoAnswerError:  # says nothing of the nodes
            return None
        return answer if now < answered_at + FRESH_SECONDS else None


class _Step:
    """The agent of a node: a shell that runs ``srun``."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], token: str) -> None:
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed in `end`
        reading, writing = os.pipe()
        self._pipe = open(writing, "wb", buffering=0)  # noqa: SIM115  # closed in `ask_to_end`
        with open(reading, "rb") as stdin:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", STEP, "sh", *command],
                env=environment, stdin=stdin, stdout=self._output, stderr=self._output,
                start_new_session=True,  # a terminal's Ctrl-C is for the driver alone
            )  # fmt: skip
        self._pipe.write(f"{token}\n".encode())  # less than a pipe holds

    def why_ended(self) -> str | None:
        """The exit code of ``srun`` and its last output; None if it still runs."""
        code = self._process.poll()
        if code is None:
            return None
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - TAIL_BYTES))
        tail = clean(self._output.read().decode(errors="replace")).splitlines()[-TAIL_LINES:]
        return "\n".join([f"srun has ended with exit code {code}", *tail])

    def ask_to_end(self) -> None:
        """Have ``srun`` kill its step. Returns at once."""
        self._pipe.close()

    def end(self, deadline: float) -> None:
        """Wait until ``srun`` has killed its step; kill ``srun`` at the deadline."""
        self.ask_to_end()
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._output.close()


class _SlurmGang(Gang):
    """Nodes of the allocation."""

    def __init__(
        self, slurm: _Slurm, request: NodeRequest, on_cpu: bool, chosen: Mapping[Node, _Host]
    ) -> None:
        self._slurm = slurm
        self._request = request
        self._on_cpu = on_cpu
        self._hosts = dict(chosen)
        self._steps: dict[Node, _Step] = {}
        self._told: set[Node] = set()
        self._draining: set[Node] = set()
        self._given_up: set[str] = set()
        self._ending: dict[str, Future[None]] = {}
        self._offered = 0
        self._states: _Question[dict[Node, str]] = _Question(QUERY_SECONDS)
        self._hosts_now: _Question[list[_Host]] = _Question(OFFER_SECONDS)

    @property
    def nodes(self) -> Sequence[Node]:
        return tuple(self._hosts)

    def start(self, node: Node, arguments: Sequence[str], token: str) -> None:
        host = self._hosts[node]
        # Of a job that has asked for GPUs in all, a step gets none by itself. For Slurm 22.05, a
        # number for each node counts for all of the job's nodes, even those without the step.
        gpus = "--gres=none" if self._on_cpu else f"--gpus={host.gpus}"
        command = (
            "srun", f"--jobid={self._slurm.job}", f"--nodelist={host.name}", gpus, *STEP_OPTIONS,
            sys.executable, *arguments,
        )  # fmt: skip
        self._steps[node] = _Step(command, self._slurm.environment, token)

    def events(self) -> Sequence[GangEvent]:
        whys = {node: why for node, step in self._steps.items() if (why := step.why_ended())}
        drains: dict[Node, str] = {}
        running = {node: self._hosts[node].name for node in self._steps if node not in whys}

        def ask() -> dict[Node, str]:
            states = self._slurm.states(running.values())
            return {node: states.get(host, "") for node, host in running.items()}

        states = (self._states.answer(ask) if running else None) or {}
        for node, state in states.items():  # of nodes that ran when Slurm was asked
            if node not in running:
                continue  # it was given up meanwhile
            if _problem(state, LOST_STATES):
                whys[node] = f"Slurm says that node {running[node]} is {state}"
            elif _problem(state, DRAIN_STATES):
                drains[node] = f"Slurm drains node {running[node]}: it is {state}"
        ended = [AgentEnded(node.name, why) for node, why in whys.items() if node not in self._told]
        draining = [
            NodeDraining(node.name, why, can_stay=True)
            for node, why in drains.items()
            if node not in self._draining
        ]
        self._told.update(whys)
        self._draining.update(drains)
        return [*ended, *draining]

    def give_up(self, node: Node) -> None:
        host = self._hosts.pop(node).name
        self._given_up.add(host)
        self._hosts_now.forget()
        if (step := self._steps.pop(node, None)) is not None:
            deadline = time.monotonic() + END_SECONDS
            self._ending[host] = in_background(lambda: step.end(deadline), "slurm-step")

    def offer(self) -> Node | None:
        """Do as `Gang.offer`. A machine that was given up is the last choice."""
        ending = [name for name, step in self._ending.items() if not step.done()]
        taken = {*ending, *(host.name for host in self._hosts.values())}
        free = [
            host
            for host in self._hosts_now.answer(self._slurm.hosts) or ()
            if not host.problem and host.name not in taken and self._slots(host)
        ]
        if not free:
            return None
        host = min(free, key=lambda host: host.name in self._given_up)
        self._offered += 1
        node = Node(f"{host.name}#{self._offered}", self._slots(host))
        self._hosts[node] = host
        return node

    def _slots(self, host: _Host) -> int:
        return host.slots(self._request, self._on_cpu)

    def release(self) -> None:
        """Do as `Gang.release`. The allocation remains: it ends with the job."""
        for step in self._steps.values():
            step.ask_to_end()
        deadline = time.monotonic() + END_SECONDS
        for step in self._steps.values():
            step.end(deadline)
        for ending in self._ending.values():
            ending.result()
        self._steps.clear()
        self._hosts.clear()
