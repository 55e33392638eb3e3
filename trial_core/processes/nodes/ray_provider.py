"""Nodes of a Ray cluster, with Ray Core: a placement group is the gang, actors hold the agents.

The flow's process is the Ray driver. Ray gives the gang its places all at once, hands out GPUs, and
reports dead actors and machines. It also moves the bundles of a dead machine. Nodes that a run can
do without, and replacements of draining nodes, have a placement group each.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

from trial_core.common.text_format import last_line
from trial_core.errors import LaunchError
from trial_core.processes.machine.accelerators import CPU_SLOTS
from trial_core.processes.machine.child import describe_exit
from trial_core.processes.nodes.node_provider import (
    NODE_SECONDS,
    AgentEnded,
    Gang,
    GangEvent,
    Node,
    NodeDraining,
    NodeProvider,
    NodeRequest,
)
from trial_core.processes.nodes.ray_connection import (
    Deadline,
    check_admission,
    connection,
    import_ray,
)

POLL_SECONDS = 0.2
LAST_LINES = 20
MAX_LINE_CHARACTERS = 500

_TIED_TO_PARENT = """
import ctypes, os, signal, sys
parent, *command = sys.argv[1:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; exec keeps it
    if os.getppid() != int(parent):
        sys.exit("the Ray actor of this agent has ended")
os.execv(command[0], command)
"""
"""Runs a command that the kernel kills when the thread that started it ends. A `preexec_fn`
could wait for ever for a lock that another thread of the process held at the fork. A raylet
also ends the children of dead actors, but may be dead itself."""


class RayProvider(NodeProvider):
    """Nodes of a Ray cluster whose clients need a token, unless `is_insecure`.

    Args:
        address: ``auto`` (``RAY_ADDRESS``, or the cluster that this machine belongs to),
            ``host:port`` or ``ray://host:port``. A process that is connected stays so.
    """

    name = "ray"

    def __init__(self, address: str = "auto", is_insecure: bool = False) -> None:
        self._address = address
        self._is_insecure = is_insecure

    def acquire(
        self, request: NodeRequest, seconds: float, should_abort: Callable[[], bool]
    ) -> RayGang:
        ray = import_ray()
        address = self._address
        if address == "auto":
            address = os.environ.get("RAY_ADDRESS", address)
        if ray.is_initialized() and "://" not in address:
            address = ray.get_runtime_context().gcs_address
        check_admission(address, self._is_insecure, seconds, should_abort)
        connection.enter(address)
        gang = None
        try:
            needed, more = divide(request, _machines())
            gang = RayGang(needed, more)
            gang.occupy(seconds, should_abort)
        except BaseException:
            if gang is None:
                connection.leave()
            else:
                gang.release()
            raise
        return gang


class RayGang(Gang):
    """The nodes of one run.

    The placement group of the nodes that the run needs serves the whole run: when a machine dies,
    Ray moves its bundle. A second group would wait for the very resources that the first has taken.

    Args:
        needed: the resources of each node without which the run cannot train.
        more: of each further node.
    """

    def __init__(
        self, needed: Sequence[Mapping[str, float]], more: Sequence[Mapping[str, float]]
    ) -> None:
        self._hosted: dict[Node, _Bundle] = {}
        self._count = 0
        self._is_released = False
        self._groups: list[Any] = []
        self._bundles = self._reserve(needed)
        # Before the first node, or after the last.
        self._vacant = [bundle for each in more for bundle in self._reserve([each])]

    @property
    def nodes(self) -> Sequence[Node]:
        return tuple(self._hosted)

    def _reserve(self, resources: Sequence[Mapping[str, float]]) -> list[_Bundle]:
        """A new placement group, which Ray places when it can."""
        # Not STRICT_SPREAD, which asks for as many machines as bundles.
        group = import_ray().util.placement_group([*map(dict, resources)], strategy="SPREAD")
        self._groups.append(group)
        return [_Bundle(group, index, each) for index, each in enumerate(resources)]

    def occupy(self, seconds: float, should_abort: Callable[[], bool]) -> None:
        """Wait for the places of the nodes that the run needs, and put an actor on each.

        Raises as `NodeProvider.acquire`; the caller releases the gang.
        """
        ray = import_ray()
        deadline = Deadline(seconds, should_abort)
        while not self._groups[0].wait(min(POLL_SECONDS, deadline.left_seconds())):
            if not deadline.left_seconds():
                wanted = [bundle.resources for bundle in self._bundles]
                raise LaunchError(
                    f"Ray has not placed {_told(wanted)}: {deadline.how()}. "
                    f"{_told_machines(_machines())}; other programs use the rest. Wait until "
                    "they end, or ask for less"
                )
        deadline = Deadline(NODE_SECONDS, should_abort)
        for bundle in self._bundles:
            self._ask_for_place(bundle)
        for bundle in self._bundles:
            try:
                self._add(_wait_for(bundle.answer, deadline), bundle)
            except (ray.exceptions.RayError, TimeoutError) as error:
                raise LaunchError(
                    "a node of the Ray cluster cannot run an agent. Each needs the same versions "
                    f"of Python, Ray and trialflow as this process: {last_line(str(error))}"
                ) from error

    def start(self, node: Node, arguments: Sequence[str], token: str) -> None:
        bundle = self._hosted[node]
        bundle.end = bundle.actor.run.remote([*arguments], token, node.slots)

    def events(self) -> Sequence[GangEvent]:
        ray = import_ray()
        found: list[GangEvent] = []
        draining = _draining_machines()
        for node, bundle in self._hosted.items():
            if bundle.machine in draining and bundle.left is None:
                bundle.left = bundle.machine
                found.append(NodeDraining(node.name, "Ray drains its machine"))
        by_end = {each.end: node for node, each in self._hosted.items() if each.end is not None}
        ended = ray.wait([*by_end], num_returns=len(by_end), timeout=0)[0] if by_end else []
        for end in ended:
            try:
                why = ray.get(end)
            except ray.exceptions.RayError as error:
                why = f"Ray has lost the agent: {last_line(str(error))}"
            self._hosted[by_end[end]].end = None
            found.append(AgentEnded(by_end[end].name, why))
        return found

    def give_up(self, node: Node) -> None:
        bundle = self._hosted.pop(node)
        import_ray().kill(bundle.actor)
        bundle.end = None
        self._vacant.append(bundle)

    def offer(self) -> Node | None:
        """Do as `Gang.offer`. The machine is the same if Ray says that it lives."""
        ray = import_ray()
        draining = _draining_machines()
        for bundle in list(self._vacant):
            if bundle.left in draining:
                continue  # Ray moves it when that machine is dead
            bundle.left = None
            if bundle.answer is None:
                self._ask_for_place(bundle)
            if not ray.wait([bundle.answer], timeout=0)[0]:
                continue
            try:
                answer = ray.get(bundle.answer)
            except ray.exceptions.RayError:
                # Until Ray knows that a machine is dead, it sends actors there, which then fail.
                ray.kill(bundle.actor)
                bundle.answer = None
                continue
            self._vacant.remove(bundle)
            return self._add(answer, bundle)
        for bundle in [*self._vacant, *self._hosted.values()]:
            if bundle.left is not None and not bundle.has_stand_in:
                bundle.has_stand_in = True
                self._vacant += self._reserve([bundle.resources])
        return None

    def release(self) -> None:
        if self._is_released:
            return
        self._is_released = True
        self._hosted.clear()
        try:
            # With its group, Ray ends an actor; its agent ends with it.
            for group in self._groups:
                import_ray().util.remove_placement_group(group)
        finally:
            connection.leave()

    def _ask_for_place(self, bundle: _Bundle) -> None:
        """Put an actor on a bundle, whose answer tells its machine."""
        ray = import_ray()
        where = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            bundle.group, placement_group_bundle_index=bundle.index
        )
        bundle.actor = (
            ray.remote(AgentHost)
            .options(
                num_cpus=bundle.resources["CPU"],
                num_gpus=bundle.resources.get("GPU", 0),
                max_restarts=0,
                scheduling_strategy=where,
            )
            .remote()
        )
        bundle.answer = bundle.actor.host.remote()

    def _add(self, answer: tuple[str, str], bundle: _Bundle) -> Node:
        host, machine = answer
        node = Node(f"{host}-{self._count}", int(bundle.resources["CPU"]))
        self._count += 1
        self._hosted[node] = bundle
        bundle.machine, bundle.answer = machine, None
        return node


class AgentHost:
    """The actor: runs an agent on a node, in one of Ray's processes."""

    def host(self) -> tuple[str, str]:
        """The machine's host name, and Ray's id of it."""
        import ray

        return socket.gethostname(), ray.get_runtime_context().get_node_id()

    def run(self, arguments: Sequence[str], token: str, cores: int) -> str:
        """Run an agent until it ends; return its exit code and last lines, for people."""
        environment = dict(os.environ)
        # Ray sets it to the bundle's cores, as if there were one rank.
        if environment.get("OMP_NUM_THREADS") == str(cores):
            del environment["OMP_NUM_THREADS"]
        read_end, write_end = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _TIED_TO_PARENT, str(os.getpid()),
             sys.executable, *arguments],
            env=environment, stdin=read_end, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            encoding="utf-8", errors="replace",
        )  # fmt: skip
        os.close(read_end)
        with contextlib.suppress(BrokenPipeError), open(write_end, "w", encoding="utf-8") as pipe:
            pipe.write(token)
        lines: deque[str] = deque(maxlen=LAST_LINES)
        # In a thread, since the agent's children may keep its output open.
        reader = threading.Thread(target=_follow, args=(process.stdout, lines), daemon=True)
        reader.start()
        # Ray lets a busy actor live on, even when its parent, the raylet, has died.
        raylet = os.getppid()
        while process.poll() is None and os.getppid() == raylet:
            time.sleep(POLL_SECONDS)
        if process.returncode is None:
            process.kill()
            return f"Ray's raylet, process {raylet} on {socket.gethostname()}, has ended"
        reader.join(timeout=1.0)
        return "\n".join([f"the agent {describe_exit(process.returncode)}", *lines])


def _follow(output: Iterable[str], lines: deque[str]) -> None:
    """Copy an agent's output to the actor's log in Ray, and its last lines to `lines`."""
    for line in output:
        print(line, end="", flush=True)
        lines.append(line.rstrip()[:MAX_LINE_CHARACTERS])


@dataclass
class _Bundle:
    """Ray's resources for one node.

    Attributes:
        left: the draining machine that the bundle is on, until Ray has moved it.
        has_stand_in: True if another bundle was reserved in its place.
        actor, answer: the bundle's actor, and the future of its `AgentHost.host` until that has
            returned.
        machine: Ray's id of the machine that it is on, or was on last.
        end: the future of `AgentHost.run`, or None if no agent runs.
    """

    group: Any
    index: int
    resources: Mapping[str, float]
    left: str | None = None
    has_stand_in: bool = False
    actor: Any = None
    answer: Any = None
    machine: str = ""
    end: Any = None


class Machine(NamedTuple):
    """A machine of the cluster, and its resources when nothing runs on it."""

    host: str
    cpus: int
    gpus: int


def _machines() -> list[Machine]:
    return [
        Machine(
            node["NodeManagerHostname"],
            int(node["Resources"].get("CPU", 0)),
            int(node["Resources"].get("GPU", 0)),
        )
        for node in import_ray().nodes()
        if node["Alive"]
    ]


def _draining_machines() -> set[str]:
    """Ray's ids of the machines that it drains, as before a preemption."""
    # Ray has no public name for it. A `ray://` client cannot ask.
    from ray._private.state import state

    try:
        return set(state.get_draining_nodes())
    except (AttributeError, RuntimeError, import_ray().exceptions.RaySystemError):
        return set()


Bundles = list[dict[str, float]]


def divide(request: NodeRequest, machines: Sequence[Machine]) -> tuple[Bundles, Bundles]:
    """The resources of each needed node, and of each further node that the run would use.

    Raises LaunchError if the machines never have that much, whatever else runs on them.
    """
    gpus = 0 if request.on_cpu else max((each.gpus for each in machines), default=0)
    size = min(request.slots, request.slots_per_node or gpus or CPU_SLOTS)
    count, rest = divmod(request.slots, size)
    kinds = ("CPU", "GPU") if gpus else ("CPU",)
    bundles = [{kind: float(each) for kind in kinds} for each in [size] * count + [rest] if each]
    needed, more = bundles[: (nodes := ceil(request.min_slots / size))], bundles[nodes:]
    count, rest = divmod(request.slots, size) if not more else (nodes, 0)
    room = [min(each.cpus, each.gpus) if gpus else each.cpus for each in machines]
    full = sum(each // size for each in room)
    if full < count or (full == count and all(each % size < rest for each in room)):
        raise LaunchError(
            f"the Ray cluster can never place {_told(needed)}: {_told_machines(machines)}. Ask "
            "for fewer slots, or set resources.slots_per_node to what each machine has"
        )
    return needed, more


def _told(bundles: Sequence[Mapping[str, float]]) -> str:
    """As in ``2 nodes with 8 CPU, 8 GPU and 1 node with 4 CPU, 4 GPU``."""
    counts = Counter(", ".join(f"{n:g} {kind}" for kind, n in each.items()) for each in bundles)
    return " and ".join(f"{n} node{'s' * (n > 1)} with {each}" for each, n in counts.items())


def _told_machines(machines: Sequence[Machine]) -> str:
    each = (f"{host} has {cpus} CPU, {gpus} GPU" for host, cpus, gpus in machines)
    return "; ".join(each) or "it has no machine"


def _wait_for(future: Any, deadline: Deadline) -> Any:
    """The result of a future. Raises TimeoutError, or RayError if the actor has failed."""
    ray = import_ray()
    while not ray.wait([future], timeout=min(POLL_SECONDS, deadline.left_seconds()))[0]:
        if not deadline.left_seconds():
            raise TimeoutError(deadline.how())
    return ray.get(future)
