"""Where a run's ranks start: on this machine, or on nodes that a provider finds.

A placement outlasts the launches of a run: interpreters that have imported PyTorch and DeepSpeed,
and nodes, stay for the ranks of the next launch.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path

from trial_core.checkpoint import layout
from trial_core.checkpoint.storage.open_storage import packages_of
from trial_core.common.any_logger import AnyLogger
from trial_core.common.text_format import plural
from trial_core.config import ExperimentConfig
from trial_core.driver.run import Launch, Run
from trial_core.errors import ConfigError, LaunchError, TrialflowError
from trial_core.observe.events.observers import Observer
from trial_core.processes.machine.accelerators import has_cpu_alone, resolve_slot_count
from trial_core.processes.nodes.hub import Hub
from trial_core.processes.nodes.join_token import new_token, token_of_file, write_token
from trial_core.processes.nodes.node_launcher import NodeCode, launch_on_nodes
from trial_core.processes.nodes.node_pool import NodePool
from trial_core.processes.nodes.node_provider import JoinProvider, NodeProvider, NodeRequest
from trial_core.processes.nodes.ray_provider import RayProvider
from trial_core.processes.nodes.slurm_provider import SlurmProvider, in_allocation
from trial_core.processes.slots.addresses import ListenAddress
from trial_core.processes.slots.fork_server import ForkServer
from trial_core.processes.slots.launcher import Launcher, launch_locally, rank_environment
from trial_core.processes.slots.rank_main import SCRIPT_MODULES, TRIAL_MODULES

JOIN_TOKEN = "join-token"
"""The file with the run's token, in the run's folder, unless the experiment names another."""


ENGINE_VARIABLE = "TRIALFLOW_ENGINE"
"""It chooses the node provider if ``resources.engine`` is auto."""


_importing: ContextVar[AbstractContextManager[ForkServer] | None] = ContextVar(
    "trialflow_importing", default=None
)
"""What the next run in this context takes, and leaves when its ranks have ended."""


class Placement(ABC):
    """Decides where the ranks of all launches of a run start.

    Attributes:
        sends_code: True if the code has to be packed and sent to the ranks' machines.
        pool: the run's nodes; None if its ranks are on one machine, or were started by others.
    """

    sends_code = False
    pool: NodePool | None = None

    @abstractmethod
    def prepare(self, launch: Launch) -> tuple[int, Launcher]:
        """Return the number of ranks to launch now, and their launcher.

        Raises LaunchError if this machine, or the present nodes, have too few slots; and Stopped if
        the run was asked to stop while it waited for nodes.
        """

    def watching(self, launch: Launch) -> AbstractContextManager[None]:
        """Watch the nodes during the block; tell the launch when it should move to others."""
        return nullcontext()


class ThisMachine(Placement):
    def __init__(self, fork_server: ForkServer) -> None:
        self._fork_server = fork_server

    def prepare(self, launch: Launch) -> tuple[int, Launcher]:
        """Return this machine's number of ranks, and a launcher on the fork server."""
        config = launch.run.config
        variables = {**os.environ, **config.rank_variables, **launch.run.devices}
        launcher = partial(launch_locally, self._fork_server, devices=launch.run.devices)
        return _slots_here(config, variables), launcher


class OnNodes(Placement):
    """Starts the ranks on the nodes of a pool. `wanted` tells people how many slots it needs."""

    pool: NodePool

    def __init__(self, pool: NodePool, wanted: str, sends_code: bool) -> None:
        self.pool = pool
        self.sends_code = sends_code
        self._wanted = wanted

    def prepare(self, launch: Launch) -> tuple[int, Launcher]:
        """Wait for the nodes; return the number of their slots, and their launcher."""
        run = launch.run
        run.clock.has_left(self.pool.slots_left)
        with launch.stage("wait-for-nodes", self._wanted, "queue"):
            agents = self.pool.gather(
                lambda: run.stopping.request is not None, on_activity=launch.note_activity
            )
        nodes = ", ".join(f"{agent.name} ({agent.slots} slots)" for agent in agents)
        run.logger.info("the nodes of this launch: %s", nodes)
        if self.sends_code and launch.code.archive is None:
            raise LaunchError(
                f"{launch.code.folder} holds no code that could be sent to the nodes: start the "
                "run in the folder of its code, or mount that on every node (environment.code: "
                "shared)"
            )
        code = NodeCode(launch.code.archive if self.sends_code else None, launch.code.folder)
        launcher = partial(launch_on_nodes, agents, code, run.store.spec, _stored_object(run))
        return self.pool.slots_of(agents), launcher

    def watching(self, launch: Launch) -> AbstractContextManager[None]:
        return self.pool.watching(launch.move_now, launch.move_at_checkpoint)


def _stored_object(run: Run) -> str | None:
    """Return the key of an object that the run has stored; None if there may be none yet."""
    if run.fence is not None:
        return layout.attempt_key(run.trial, run.fence.number)
    return run.claim.key if run.claim is not None and run.claim.is_written else None


@contextmanager
def place_ranks(
    config: ExperimentConfig, run_dir: Path, announce: Callable[[str], None]
) -> Iterator[Placement]:
    """Place the ranks of a run. At the end of the block they and their nodes are gone.

    Args:
        announce: called with how nodes join, if people start them.

    Raises:
        ConfigError: the experiment cannot run on several machines.
        LaunchError: the driver cannot listen for nodes.
    """
    provider = choose_provider(config)
    if provider is None:
        ahead = _importing.get()
        # A run of one of its stages gets another.
        with _next_takes(None), ahead or ForkServer(_modules(config)) as fork_server:
            yield ThisMachine(fork_server)
        return
    preload = config.resources.preload
    what = ("script" if config.is_script else "trial") if preload else "none"
    with on_nodes(config, provider, run_dir, announce, preload=what) as placement:
        yield placement


@contextmanager
def importing_ahead(config: ExperimentConfig, late: Sequence[str] = ()) -> Iterator[None]:
    """Import PyTorch and DeepSpeed for the ranks of the block's run, while it prepares the rest.

    Only on a machine without accelerators: a run gets those later, and counting them may take
    seconds. Does nothing within another such block. `late` as for `ForkServer`.
    """
    if _importing.get() is not None:
        yield
        return
    with ForkServer(_modules(config), late) as fork_server:
        with suppress(TrialflowError, OSError):  # the run reports it
            variables = {**os.environ, **config.rank_variables}
            is_here = config.resources.preload and choose_provider(config) is None
            if is_here and has_cpu_alone(variables):
                slots = _slots_here(config, variables)
                environment = rank_environment(slots, config.rank_variables)
                fork_server.prepare(environment, config.code, Path(os.devnull))
        with _next_takes(fork_server):
            yield


@contextmanager
def _next_takes(fork_server: AbstractContextManager[ForkServer] | None) -> Iterator[None]:
    """Have the next run in the block take this fork server; None: start one."""
    token = _importing.set(fork_server)
    try:
        yield
    finally:
        _importing.reset(token)


class ForkServers(AbstractContextManager["ForkServers"]):
    """Fork servers for many runs, some of them side by side. A context manager.

    Each serves one run at a time. It stays for the next one, whose ranks then begin without
    importing PyTorch, also on other accelerators. The first is that of `importing_ahead`, inside
    such a block.
    """

    def __init__(self) -> None:
        ahead = _importing.get()
        self._idle = [] if ahead is None else [ahead.__enter__()]
        self._is_closed = False

    def __exit__(self, *error: object) -> None:
        self._is_closed = True  # the server of a run that has not ended closes with it
        for server in self._idle:
            server.close()

    @contextmanager
    def one(self, config: ExperimentConfig) -> Iterator[None]:
        """Have the block's run take one."""
        try:
            server = self._idle.pop()
        except IndexError:
            server = ForkServer(_modules(config))
        try:
            with _next_takes(nullcontext(server)):
                yield
        finally:
            server.free_memory()
            self._idle.append(server)
            if self._is_closed:
                server.close()


def _modules(config: ExperimentConfig) -> Sequence[str]:
    """Return the modules to import before ranks are forked."""
    if not config.resources.preload:
        return ()
    of_ranks = SCRIPT_MODULES if config.is_script else TRIAL_MODULES
    return *of_ranks, *packages_of(config.checkpoint_storage.url)


def _slots_here(config: ExperimentConfig, variables: Mapping[str, str]) -> int:
    resources = config.resources
    return resolve_slot_count(resources.min_slots, variables, resources.max_slots)


@contextmanager
def on_nodes(
    config: ExperimentConfig,
    provider: NodeProvider,
    run_dir: Path,
    announce: Callable[[str], None],
    *,
    preload: str = "none",
    same_versions: bool = True,
) -> Iterator[OnNodes]:
    """Take nodes from a provider for a run. At the end of the block they are given back.

    Args:
        run_dir: the folder for the token of a `JoinProvider`.
        announce: called with how nodes join, if people start them.
        preload: the agents' imports before ranks are forked, a key of `agent_main.PRELOADS`.
        same_versions: see `Hub`.

    Raises as `place_ranks`.
    """
    request, resources = _request(config, provider), config.resources
    channel = resources.channel
    of_file = provider.name == JoinProvider.name
    tokens = _join_token(config, run_dir) if of_file else nullcontext((new_token(), None))
    with (
        tokens as (token, path),
        Hub(
            ListenAddress(channel.bind, channel.port_range, channel.advertise),
            token,
            slots_per_node=request.slots_per_node,
            environment=config.rank_variables,
            network=resources.network,
            same_versions=same_versions,
        ) as hub,
        NodePool(
            provider,
            hub,
            request,
            token,
            resources.max_wait_seconds,
            resources.replace_seconds,
            ("--preload", preload),
        ) as pool,
    ):
        if path is not None:
            command = f"--driver {hub.address} --token-file {path}"
            announce(f"run this on each node: trialflow join {command}")
        least = f"{request.min_slots} to " if request.min_slots < request.slots else ""
        sends_code = config.environment.code != "shared"
        yield OnNodes(pool, least + plural(request.slots, "slot"), sends_code)


def announcer(logger: AnyLogger, observer: Observer) -> Callable[[str], None]:
    """Return a function that tells the log and the observer how nodes join."""

    def announce(how: str) -> None:
        logger.info("%s", how)
        observer.notice(how)

    return announce


def choose_provider(
    config: ExperimentConfig, environment: Mapping[str, str] = os.environ
) -> NodeProvider | None:
    """Return the provider of the run's nodes; None if the ranks start on this machine.

    Raises ConfigError if the environment names an unknown engine.
    """
    name: str = config.resources.engine
    if name == "auto":  # it depends on the place more than on the experiment
        name = environment.get(ENGINE_VARIABLE) or _provider_here(environment)
    if name == "join":
        return JoinProvider()
    if name == "ray":
        return RayProvider(config.resources.ray.address, config.resources.ray.insecure)
    if name == "slurm":
        return SlurmProvider(environment)
    if name != "local":
        raise ConfigError(
            f"the environment variable {ENGINE_VARIABLE} is {name!r}, expected local, join, ray "
            "or slurm, as resources.engine"
        )
    return None


def _provider_here(environment: Mapping[str, str]) -> str:
    has_several = in_allocation(environment) and environment.get("SLURM_JOB_NUM_NODES") != "1"
    return "slurm" if has_several else "local"


def _request(config: ExperimentConfig, provider: NodeProvider) -> NodeRequest:
    resources = config.resources
    slots, min_slots = resources.max_slots, resources.min_slots
    per_node = resources.slots_per_node
    if not isinstance(slots, int) or not isinstance(min_slots, int):
        raise ConfigError(
            f"resources.slots_per_trial: auto counts the accelerators of this machine; with "
            f"resources.engine: {provider.name}, say how many slots the run needs on all machines "
            "(--set resources.slots_per_trial=8)"
        )
    if config.checkpoint_storage.url.startswith("memory://"):
        raise ConfigError(
            "checkpoint_storage: memory:// is seen by this process alone, and not by the ranks of "
            "other machines; use an object storage, or a folder that all machines mount"
        )
    return NodeRequest(
        slots,
        min_slots,
        per_node if isinstance(per_node, int) else None,
        on_cpu=resources.accelerator == "cpu",
    )


@contextmanager
def _join_token(config: ExperimentConfig, run_dir: Path) -> Iterator[tuple[str, Path | None]]:
    """Yield the run's token and its file, which is deleted at the end if it is in `run_dir`."""
    given = config.resources.channel.token_file
    path = (given.expanduser() if given is not None else run_dir / JOIN_TOKEN).absolute()
    try:
        is_kept = given is not None and path.exists()
        yield token_of_file(path) if is_kept else write_token(path), path
    finally:
        if given is None:
            path.unlink(missing_ok=True)
