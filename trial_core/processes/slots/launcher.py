"""Starts a slot group's ranks on this machine; they join the channel by themselves.

Each rank gets the variables of torchrun and of DeepSpeed's launcher, its own process group (a
terminal's Ctrl-C and a Prefect worker's SIGTERM must reach only the driver), and a log file as
stdout and stderr (a rank with the driver's stdout would keep it open).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from trial_core.errors import LaunchError
from trial_core.messages import Message
from trial_core.processes.machine.accelerators import (
    CPU,
    KIND_VARIABLE,
    available_cores,
    visible_accelerators,
)
from trial_core.processes.slots.addresses import LOOPBACK_ADDRESS, collectives_at
from trial_core.processes.slots.channel import Channel, Listener
from trial_core.processes.slots.device_locks import lock_descriptors
from trial_core.processes.slots.fork_server import ForkServer
from trial_core.processes.slots.rank_handle import RankHandle


@dataclass(frozen=True)
class LaunchRequest:
    """The launch that a slot group asks for.

    Attributes:
        working_dir, log_dir: the folders of the user's code and of the ``rank-N.log`` files, on
            this machine.
        environment: the experiment's variables; they override those of the process that starts
            the ranks.
        on_exit: called with a rank and its return code once it and its children have ended.
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


Launcher = Callable[[LaunchRequest, list[RankHandle]], RankConnections]
"""Starts the ranks of a slot group, one group at a time; they join later.

Each rank is added to the list, in order, before it is started; after an error, the caller ends
them. Raises LaunchError if the ranks cannot be started, RankFailed if a machine was lost meanwhile,
and Stopped if `should_abort` returned True.
"""


def launch_locally(
    fork_server: ForkServer,
    launch: LaunchRequest,
    ranks: list[RankHandle],
    devices: Mapping[str, str] | None = None,
) -> Channel:
    """Start ranks on this machine, as a `Launcher` does.

    `devices` are variables that give them the run's reserved accelerators, with their locks.
    """
    # Bound here, so that no other process can take the port, and other machines cannot connect.
    try:
        store = socket.create_server((LOOPBACK_ADDRESS, 0))
    except OSError as error:
        raise LaunchError(f"cannot listen on {LOOPBACK_ADDRESS}: {error}") from error
    with store:
        share = MachineShare(0, launch.world_size, launch.world_size, store.getsockname())
        return launch_here(launch, share, fork_server, store, ranks, devices)


class MachineShare(msgspec.Struct, frozen=True):
    """The ranks that a launch starts on one machine, among those of the run.

    Attributes:
        store: address and port of torch.distributed's store, on the ranks' network.
        address: this machine's address there.
        node, nodes: the machine's index, and the number of machines.
    """

    first_rank: int
    count: int
    world_size: int
    store: tuple[str, int]
    address: str = LOOPBACK_ADDRESS
    node: int = 0
    nodes: int = 1

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.count)


def launch_here(
    launch: LaunchRequest,
    share: MachineShare,
    fork_server: ForkServer,
    store: socket.socket | None,
    ranks: list[RankHandle],
    devices: Mapping[str, str] | None = None,
) -> Channel:
    """Start a launch's ranks on this machine, added to `ranks` as by a `Launcher`.

    Args:
        store: the bound socket on which rank 0 hosts the store, if rank 0 is among them.
        devices: see `launch_locally`. The fork server does not get them: it stays for other runs,
            which have other devices.

    Raises:
        LaunchError: a process or its log cannot be created; `ranks` has the started ones.
    """
    channel = Channel(share.ranks, launch.listener)
    try:
        launch.log_dir.mkdir(parents=True, exist_ok=True)
        base = rank_environment(len(share.ranks), launch.environment, share.address)
        first_log = launch.log_dir / f"rank-{share.ranks[0]}.log"
        server = fork_server.prepare(base, launch.working_dir, first_log)
        devices = devices or {}
        locks = lock_descriptors(devices)
        for local_rank, rank in enumerate(share.ranks):
            log_path = launch.log_dir / f"rank-{rank}.log"
            process = server.new_rank(rank, log_path, launch.on_exit)
            own = {"TRIALFLOW_CHANNEL": channel.address, "TRIALFLOW_LOG": str(log_path)}
            variables = {**place_variables(share, local_rank), **devices, **own}
            stores = [store.fileno()] if store is not None and rank == 0 else []
            # It reads the secret from its stdin: other processes see its environment.
            reading, writing = os.pipe()
            with open(reading, "rb") as stdin, log_path.open("ab") as log:
                with open(writing, "wb") as pipe:
                    pipe.write(channel.secret)
                descriptors = [stdin.fileno(), log.fileno(), *locks, *stores]
                ranks.append(process)
                server.start(process, variables, launch.working_dir, descriptors)
    except OSError as error:
        channel.close()
        raise LaunchError(f"cannot start the ranks in {launch.working_dir}: {error}") from error
    except BaseException:
        channel.close()
        raise
    return channel


def place_variables(share: MachineShare, local_rank: int) -> dict[str, str]:
    """The variables by which torchrun and DeepSpeed's launcher tell a rank its place."""
    address, port = share.store
    place = {
        "MASTER_PORT": port,
        "WORLD_SIZE": share.world_size,
        "RANK": share.ranks[local_rank],
        "LOCAL_RANK": local_rank,
        **dict.fromkeys(("LOCAL_WORLD_SIZE", "LOCAL_SIZE"), len(share.ranks)),
        **dict.fromkeys(("GROUP_RANK", "CROSS_RANK"), share.node),
        "CROSS_SIZE": share.nodes,
    }
    return {"MASTER_ADDR": address, **{name: str(number) for name, number in place.items()}}


def rank_environment(
    local_size: int, environment: Mapping[str, str], address: str = LOOPBACK_ADDRESS
) -> dict[str, str]:
    """The variables that all ranks of this machine have in common.

    Each rank gets its share of the cores; libraries would otherwise start a thread per core in
    every rank. Threads of CPU ranks sleep while they wait for each other. If they spin, as is
    OpenMP's default, and another process has a core, a batch takes many times as long. The order
    of a set of names is the same in all ranks of all attempts, unless `PYTHONHASHSEED` is given.

    Args:
        address: this machine's address on the ranks' network.

    Raises:
        LaunchError: the accelerators cannot be counted, or torch cannot use them.
    """
    base = {**os.environ, **environment}
    base.update(LOCAL_WORLD_SIZE=str(local_size), PYTHONUNBUFFERED="1")
    base[KIND_VARIABLE] = visible_accelerators(base).kind
    base.setdefault("PYTHONHASHSEED", "0")  # the same for all runs that one fork server serves
    base.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // local_size)))
    if base[KIND_VARIABLE] == CPU:
        base.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return {**collectives_at(address), **base}
