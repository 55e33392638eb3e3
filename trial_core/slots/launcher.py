"""Starts a slot group's ranks, on this machine; they join the channel by themselves.

Each rank gets torchrun's environment variables, its own process group (a terminal's Ctrl-C and a
Prefect worker's SIGTERM must reach only the driver), and a log file as stdout and stderr (a rank
with the driver's stdout would keep it open).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trial_core.errors import LaunchError
from trial_core.messages import Message
from trial_core.slots.accelerators import (
    CPU,
    KIND_VARIABLE,
    available_cores,
    visible_accelerators,
)
from trial_core.slots.channel import Channel, Listener
from trial_core.slots.fork_server import ForkServer, RankProcess
from trial_core.slots.rank_handle import RankHandle
from trial_core.slots.rank_network import LOOPBACK_ADDRESS, collectives_at


@dataclass(frozen=True)
class LaunchRequest:
    """What a slot group wants to have started.

    Attributes:
        working_dir: the folder of the user's code, on this machine.
        log_dir: the folder of the ``rank-N.log`` files, on this machine.
        environment: the experiment's variables; they override those of the process that starts
            the ranks.
        on_exit: called with a rank and its return code when it and its children have ended.
        should_abort: asked while something takes long whether to give up.
    """

    world_size: int
    working_dir: Path
    log_dir: Path
    environment: Mapping[str, str]
    listener: Listener
    on_exit: Callable[[int, int], None]
    should_abort: Callable[[], bool] = lambda: False


class RankConnections(Protocol):
    """The driver's connections to the ranks of one launch."""

    def send(self, message: Message) -> None:
        """Send a message to every rank that has joined."""

    def close(self) -> None:
        """Close them, after the ranks were killed. Ranks that still run then exit."""


class Launcher(Protocol):
    """Starts the ranks of slot groups, one group at a time."""

    def launch(self, launch: LaunchRequest, ranks: list[RankHandle]) -> RankConnections:
        """Start the ranks; they join later.

        Args:
            ranks: each rank is added here, in their order, before it is started.

        Raises:
            LaunchError: they cannot be started; `ranks` has those that were, which the caller ends.
            RankFailed: a machine was lost meanwhile; likewise.
            Stopped: `should_abort` returned True; likewise.
        """


class LocalLauncher:
    """Starts ranks on this machine, by a fork server that stays, or by one for each group."""

    def __init__(self, fork_server: ForkServer | None = None) -> None:
        self._fork_server = fork_server

    def launch(self, launch: LaunchRequest, ranks: list[RankHandle]) -> RankConnections:
        """Part of `Launcher`."""
        # Bound here, so that no other process can take the port, and other machines cannot connect.
        try:
            store = socket.create_server((LOOPBACK_ADDRESS, 0))
        except OSError as error:
            raise LaunchError(f"cannot listen on {LOOPBACK_ADDRESS}: {error}") from error
        with store:
            share = MachineShare(range(launch.world_size), launch.world_size, store.getsockname())
            if self._fork_server is not None:
                return launch_here(launch, share, self._fork_server, store, ranks)
            own = ForkServer()
            return launch_here(launch, share, own, store, ranks, own)


@dataclass(frozen=True)
class MachineShare:
    """The ranks that a launch starts on one machine, among those of the run.

    Attributes:
        world_size: the number of the run's ranks.
        store: address and port of torch.distributed's store, on the ranks' network.
        address: that of this machine there.
        node, nodes: the machine's index, and how many there are.
    """

    ranks: range
    world_size: int
    store: tuple[str, int]
    address: str = LOOPBACK_ADDRESS
    node: int = 0
    nodes: int = 1


class LocalConnections:
    """The connections to ranks of this machine. A fork server that is given is closed with them."""

    def __init__(self, channel: Channel, fork_server: ForkServer | None) -> None:
        self._channel = channel
        self._fork_server = fork_server

    def send(self, message: Message) -> None:
        """Part of `RankConnections`."""
        self._channel.send(message)

    def send_encoded(self, data: bytes) -> None:
        """Send an encoded message to every rank of this machine that has joined."""
        self._channel.send_encoded(data)

    def close(self) -> None:
        """Part of `RankConnections`."""
        if self._fork_server is not None:
            self._fork_server.close()
        self._channel.close()


def launch_here(
    launch: LaunchRequest,
    share: MachineShare,
    fork_server: ForkServer,
    store: socket.socket | None,
    ranks: list[RankHandle],
    owned: ForkServer | None = None,
) -> LocalConnections:
    """Start those ranks of a launch that this machine gets.

    Args:
        store: the bound socket on which rank 0 hosts the store, if rank 0 is one of them.
        ranks: each rank is added here before it is started, so that none is lost.
        owned: a fork server that the result closes.

    Raises:
        LaunchError: a process or its log cannot be created; `ranks` has those already started.
    """
    channel = Channel(share.ranks, launch.listener)
    try:
        _start_all(launch, share, fork_server, channel, store, ranks)
    except BaseException:
        LocalConnections(channel, owned).close()
        raise
    return LocalConnections(channel, owned)


def _start_all(
    launch: LaunchRequest,
    share: MachineShare,
    fork_server: ForkServer,
    channel: Channel,
    store: socket.socket | None,
    ranks: list[RankHandle],
) -> None:
    base = rank_environment(len(share.ranks), launch.environment, share.address)
    log_paths = {rank: launch.log_dir / f"rank-{rank}.log" for rank in share.ranks}
    try:
        launch.log_dir.mkdir(parents=True, exist_ok=True)
        fork_server.prepare(base, launch.working_dir, log_paths[share.ranks[0]])
        address, port = share.store
        common = {
            "TRIALFLOW_CHANNEL": channel.address,
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(share.world_size),
            "GROUP_RANK": str(share.node),
            "CROSS_SIZE": str(share.nodes),
        }
        for local_rank, (rank, log_path) in enumerate(log_paths.items()):
            process = fork_server.new_rank(rank, log_path, launch.on_exit)
            ranks.append(process)
            own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "TRIALFLOW_LOG": str(log_path)}
            stores = [store.fileno()] if store is not None and rank == 0 else []
            _start(process, {**common, **own}, launch.working_dir, channel.secret, stores)
    except OSError as error:
        raise LaunchError(f"cannot start the ranks in {launch.working_dir}: {error}") from error


def rank_environment(
    local_size: int, environment: Mapping[str, str], address: str = LOOPBACK_ADDRESS
) -> dict[str, str]:
    """The variables that all ranks of this machine have in common.

    Each rank gets its share of the cores: libraries would start a thread per core in every rank.
    Threads of ranks on the CPU sleep while they wait for each other: if they spin, as is OpenMP's
    default, and another process has a core, a batch takes many times as long.

    Args:
        address: that of this machine on the ranks' network.

    Raises:
        LaunchError: the accelerators cannot be counted, or torch cannot use them.
    """
    base = {**os.environ, **environment}
    base.update(LOCAL_WORLD_SIZE=str(local_size), PYTHONUNBUFFERED="1")
    base[KIND_VARIABLE] = visible_accelerators(base).kind
    base.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // local_size)))
    if base[KIND_VARIABLE] == CPU:
        base.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return {**collectives_at(address), **base}


def _start(
    process: RankProcess,
    variables: Mapping[str, str],
    folder: Path,
    secret: bytes,
    stores: list[int],
) -> None:
    """Start a rank. It reads `secret` from its stdin: other processes see its environment."""
    reading, writing = os.pipe()
    with open(reading, "rb") as stdin, process.log_path.open("ab") as log:
        with open(writing, "wb") as pipe:
            pipe.write(secret)
        process.start(variables, folder, [stdin.fileno(), log.fileno(), *stores])
