"""Where a run's ranks start: on this machine, or on nodes that an engine finds.

A placement outlasts the launches of a run: interpreters that have imported PyTorch and DeepSpeed,
and nodes, stay for the ranks of the next launch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

from prefect.logging import get_run_logger

from trial_core.checkpoint import layout
from trial_core.config import ExperimentConfig
from trial_core.errors import ConfigError, LaunchError
from trial_core.nodes.engine import Engine, NodeRequest
from trial_core.nodes.hub import Hub, ListenAddress
from trial_core.nodes.join_engine import JoinEngine
from trial_core.nodes.join_token import new_token, token_of_file, write_token
from trial_core.nodes.node_launcher import NodeCode, NodeLauncher
from trial_core.nodes.node_pool import NodePool
from trial_core.nodes.ray_engine import RayEngine
from trial_core.nodes.slurm_engine import SlurmEngine, in_allocation
from trial_core.run.observer import current_observer
from trial_core.slots.accelerators import resolve_slot_count
from trial_core.slots.fork_server import ForkServer
from trial_core.slots.launcher import Launcher, LocalLauncher
from trial_core.slots.rank_main import SCRIPT_MODULES, TRIAL_MODULES
from trial_core.text_format import plural
from trialflow.tasks.trial_run import TrialRun

JOIN_TOKEN = "join-token"
"""The file with the run's token, in the run's folder, unless the experiment names another."""


ENGINE_VARIABLE = "TRIALFLOW_ENGINE"
"""The engine of runs whose experiment leaves it to the place: ``resources.engine: auto``."""


class Placement(Protocol):
    """Where the ranks of all launches of a run start.

    Attributes:
        sends_code: whether the code has to be packed, to be sent to where they start.
    """

    sends_code: bool

    def prepare(self, run: TrialRun) -> tuple[int, Launcher]:
        """How many ranks to launch now, and what starts them.

        Raises:
            LaunchError: this machine, or the nodes that there are, have too few slots.
            Stopped: the run was asked to stop while it waited for nodes.
        """

    def leave_out(self, slots: int) -> bool:
        """Launch no longer this number of ranks, which the trial cannot be trained with.

        Returns:
            Whether another number is possible.
        """

    def has_trained(self) -> None:
        """Note that the ranks of the last launch have trained a batch."""

    def retreat(self, why: str) -> bool:
        """Leave the nodes that were taken after the last launch that has trained.

        Args:
            why: what has failed with them.

        Returns:
            Whether there are such nodes, and enough without them.
        """

    def leave(self, node: str, why: str) -> None:
        """Leave a node if it was taken after the last launch that has trained.

        Another one may be taken in its place.
        """

    def watching(self, run: TrialRun) -> AbstractContextManager[None]:
        """Tell the run during the block when its ranks should be launched on other nodes."""


class ThisMachine:
    """The ranks start on this machine.

    Args:
        fork_server: starts them; None: each launch starts one.
    """

    sends_code = False

    def __init__(self, fork_server: ForkServer | None = None) -> None:
        self._fork_server = fork_server

    def prepare(self, run: TrialRun) -> tuple[int, Launcher]:
        """Part of `Placement`."""
        variables = {**os.environ, **run.config.rank_variables, **run.devices}
        resources = run.config.resources
        slots = resolve_slot_count(resources.min_slots, variables, resources.max_slots)
        return slots, LocalLauncher(self._fork_server)

    def leave_out(self, slots: int) -> bool:
        """Part of `Placement`."""
        return False

    def has_trained(self) -> None:
        """Part of `Placement`."""

    def retreat(self, why: str) -> bool:
        """Part of `Placement`."""
        return False

    def leave(self, node: str, why: str) -> None:
        """Part of `Placement`."""

    def watching(self, run: TrialRun) -> AbstractContextManager[None]:
        """Part of `Placement`."""
        return nullcontext()


class OnNodes:
    """The ranks start on nodes.

    Attributes:
        pool: keeps the nodes.

    Args:
        wanted: what the run needs, for people.
        sends_code: as in `Placement`; else every node has the folder under its path.
    """

    def __init__(self, pool: NodePool, wanted: str, sends_code: bool) -> None:
        self.pool = pool
        self.sends_code = sends_code
        self._wanted = wanted

    def prepare(self, run: TrialRun) -> tuple[int, Launcher]:
        """Part of `Placement`. Waits for the nodes."""
        run.clock.has_left(self.pool.slots_left)
        with run.stage("wait-for-nodes", self._wanted):
            agents = self.pool.gather(
                lambda: run.stopping.request is not None, on_activity=run.note_activity
            )
        nodes = ", ".join(f"{agent.name} ({agent.slots} slots)" for agent in agents)
        run.logger.info("the nodes of this launch: %s", nodes)
        if self.sends_code and run.code.archive is None:
            raise LaunchError(
                f"{run.code.folder} holds no code that could be sent to the nodes: start the run "
                "in the folder of its code, or mount that on every node (environment.code: shared)"
            )
        code = NodeCode(run.code.archive if self.sends_code else None, run.code.folder)
        key = layout.claim_key(run.trial)
        return self.pool.slots_of(agents), NodeLauncher(agents, code, run.store.spec, key)

    def leave_out(self, slots: int) -> bool:
        """Part of `Placement`."""
        return self.pool.leave_out(slots)

    def has_trained(self) -> None:
        """Part of `Placement`."""
        self.pool.has_trained()

    def retreat(self, why: str) -> bool:
        """Part of `Placement`."""
        return self.pool.retreat(why)

    def leave(self, node: str, why: str) -> None:
        """Part of `Placement`."""
        self.pool.leave(node, why)

    def watching(self, run: TrialRun) -> AbstractContextManager[None]:
        """Part of `Placement`."""
        return self.pool.watching(run.move_now, run.move_at_checkpoint)


@contextmanager
def place_ranks(config: ExperimentConfig, run_dir: Path) -> Iterator[Placement]:
    """Where the ranks of a run start. At the end of the block they and their nodes are gone.

    Raises:
        ConfigError: the experiment cannot run on several machines.
        LaunchError: the driver cannot listen for nodes.
    """
    engine = choose_engine(config)
    preload = config.resources.preload
    if engine is None:
        modules = SCRIPT_MODULES if config.is_script else TRIAL_MODULES
        with ForkServer(modules if preload else ()) as fork_server:
            yield ThisMachine(fork_server)
        return
    what = ("script" if config.is_script else "trial") if preload else "none"
    with on_nodes(config, engine, run_dir, _announce, preload=what) as placement:
        yield placement


@contextmanager
def on_nodes(
    config: ExperimentConfig,
    engine: Engine,
    run_dir: Path,
    announce: Callable[[str], None],
    *,
    preload: str = "none",
    same_versions: bool = True,
) -> Iterator[OnNodes]:
    """The nodes that an engine finds for a run. At the end of the block they are given back.

    Args:
        run_dir: where the token for the engine ``join`` is written.
        announce: told how nodes join, if people start them.
        preload: what the agents' ranks import before they are forked, as in `agent_main.PRELOADS`.
        same_versions: as for `Hub`.

    Raises:
        ConfigError: the experiment cannot run on several machines.
        LaunchError: the driver cannot listen for nodes.
    """
    request = _request(config, engine)
    token = _join_token(config, run_dir) if engine.name == JoinEngine.name else new_token()
    resources = config.resources
    channel = resources.channel
    hub = Hub(
        ListenAddress(channel.bind, channel.port_range, channel.advertise),
        token,
        slots_per_node=request.slots_per_node,
        environment=config.rank_variables,
        network=resources.network,
        same_versions=same_versions,
    )
    with (
        _deleted_at_end(config, engine, run_dir),
        hub,
        NodePool(
            engine,
            hub,
            request,
            token,
            resources.max_wait_seconds,
            resources.replace_seconds,
            ("--preload", preload),
        ) as pool,
    ):
        if engine.name == JoinEngine.name:
            command = f"--driver {hub.address} --token-file {_token_path(config, run_dir)}"
            announce(f"run this on each node: trialflow join {command}")
        least = f"{request.min_slots} to " if request.min_slots < request.slots else ""
        sends_code = config.environment.code != "shared"
        yield OnNodes(pool, least + plural(request.slots, "slot"), sends_code)


def _announce(how: str) -> None:
    get_run_logger().info("%s", how)
    current_observer().notice(how)


def choose_engine(
    config: ExperimentConfig, environment: Mapping[str, str] = os.environ
) -> Engine | None:
    """What finds the run's nodes; None: the ranks start on this machine.

    Raises:
        ConfigError: the environment names an engine that there is not.
    """
    name: str = config.resources.engine
    if name == "auto":  # the engine belongs to the place more than to the experiment
        name = environment.get(ENGINE_VARIABLE) or _engine_here(environment)
    if name == "join":
        return JoinEngine()
    if name == "ray":
        return RayEngine(config.resources.ray.address, config.resources.ray.insecure)
    if name == "slurm":
        return SlurmEngine(environment)
    if name != "local":
        raise ConfigError(
            f"the environment variable {ENGINE_VARIABLE} is {name!r}, expected local, join, ray "
            "or slurm, as resources.engine"
        )
    return None


def _engine_here(environment: Mapping[str, str]) -> str:
    has_several = in_allocation(environment) and environment.get("SLURM_JOB_NUM_NODES") != "1"
    return "slurm" if has_several else "local"


def _request(config: ExperimentConfig, engine: Engine) -> NodeRequest:
    """The nodes that a run needs.

    Raises:
        ConfigError: the experiment does not say how many ranks; or its storage is no other
            process's.
    """
    resources = config.resources
    slots, min_slots, per_node = (
        resources.max_slots, resources.min_slots, resources.slots_per_node,
    )  # fmt: skip
    if not isinstance(slots, int) or not isinstance(min_slots, int):
        raise ConfigError(
            f"resources.slots_per_trial: auto counts the accelerators of this machine; with "
            f"engine {engine.name}, say how many slots the run needs on all machines (--set "
            "resources.slots_per_trial=8)"
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


def _token_path(config: ExperimentConfig, run_dir: Path) -> Path:
    given = config.resources.channel.token_file
    return (given.expanduser() if given is not None else run_dir / JOIN_TOKEN).absolute()


@contextmanager
def _deleted_at_end(config: ExperimentConfig, engine: Engine, run_dir: Path) -> Iterator[None]:
    """Delete the token in the run's folder when the run has ended."""
    try:
        yield
    finally:
        if engine.name == JoinEngine.name and config.resources.channel.token_file is None:
            _token_path(config, run_dir).unlink(missing_ok=True)


def _join_token(config: ExperimentConfig, run_dir: Path) -> str:
    path = _token_path(config, run_dir)
    if config.resources.channel.token_file is not None and path.exists():
        return token_of_file(path)
    return write_token(path)
