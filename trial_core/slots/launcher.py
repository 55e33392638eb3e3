"""Starts rank processes on this machine; they join the channel by themselves.

Each rank gets torchrun's environment variables, its own process group (a terminal's Ctrl-C and a
Prefect worker's SIGTERM must reach only the driver), and a log file as stdout and stderr (a rank
with the driver's stdout would keep it open).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from trial_core.errors import LaunchError
from trial_core.slots.accelerators import KIND_VARIABLE, available_cores, visible_accelerators
from trial_core.slots.fork_server import ForkServer, RankProcess
from trial_core.slots.rank_network import LOOPBACK_ADDRESS, loopback_collectives


def launch_ranks(
    world_size: int,
    *,
    address: str,
    secret: bytes,
    log_dir: Path,
    working_dir: Path,
    environment: Mapping[str, str],
    fork_server: ForkServer,
    on_exit: Callable[[int, int], None],
    ranks: list[RankProcess],
) -> None:
    """Start `world_size` workers that will join the channel at `address`.

    Args:
        environment: the experiment's variables; they override those of this process.
        fork_server: forks the ranks, and ends them when this process ends.
        on_exit: called with a rank and its return code when it ends.
        ranks: each rank is added here as soon as it is started, so that none is lost.

    Raises:
        LaunchError: a process or its log cannot be created; `ranks` has those already started.
    """
    base = rank_environment(world_size, environment)
    log_paths = [log_dir / f"rank-{rank}.log" for rank in range(world_size)]
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        fork_server.prepare(base, working_dir, log_paths[0])
        # Bound here, so that no other process can take the port, and other machines cannot connect.
        with socket.create_server((LOOPBACK_ADDRESS, 0)) as store:
            launch = {
                "TRIALFLOW_CHANNEL": address,
                "MASTER_ADDR": LOOPBACK_ADDRESS,
                "MASTER_PORT": str(store.getsockname()[1]),
            }
            for rank, log_path in enumerate(log_paths):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TRIALFLOW_LOG": str(log_path)}
                process = fork_server.new_rank(rank, log_path, on_exit)
                ranks.append(process)
                _start(process, {**launch, **own}, secret, store.fileno())
    except OSError as error:
        raise LaunchError(f"cannot start the ranks in {working_dir}: {error}") from error


def rank_environment(world_size: int, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that all ranks have in common.

    Each rank gets its share of the cores: libraries would start a thread per core in every rank.

    Raises:
        LaunchError: the accelerators cannot be counted, or torch cannot use them.
    """
    base = {**os.environ, **environment}
    base.update(
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        PYTHONUNBUFFERED="1",
    )
    base[KIND_VARIABLE] = visible_accelerators(base).kind
    base.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // world_size)))
    return {**loopback_collectives(), **base}


def _start(process: RankProcess, variables: Mapping[str, str], secret: bytes, store: int) -> None:
    """Start a rank. It reads `secret` from its stdin: other processes see its environment."""
    reading, writing = os.pipe()
    with open(reading, "rb") as stdin, process.log_path.open("ab") as log:
        with open(writing, "wb") as pipe:
            pipe.write(secret)
        stores = [store] if process.rank == 0 else []
        process.start(variables, [stdin.fileno(), log.fileno(), *stores])
