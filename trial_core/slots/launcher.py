"""Starting rank processes on this machine. Launching is only that: they join by themselves.

Each rank gets the environment that torchrun would set, a process group of its own (a terminal's
Ctrl-C and a Prefect worker's SIGTERM are for the driver, which ends its ranks itself), and its
own log as stdout and stderr (a rank holding the driver's stdout would keep it open).
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trial_core.errors import LaunchError
from trial_core.slots.accelerators import count_accelerators

WORKER_MODULE = "trial_core.slots.worker"


@dataclass
class RankProcess:
    """A rank that this process has started."""

    rank: int
    process: subprocess.Popen[bytes]
    log_path: Path

    def log_tail(self, lines: int = 20, limit_bytes: int = 16384) -> str:
        """The last lines of the rank's log."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, self.log_path.stat().st_size - limit_bytes))
                text = log.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def kill(self) -> None:
        """SIGKILL the rank and everything it has started (data loader workers, compilers)."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self.process.kill()


def launch_ranks(
    world_size: int,
    *,
    address: str,
    secret: bytes,
    log_dir: Path,
    working_dir: Path,
    environment: Mapping[str, str],
) -> list[RankProcess]:
    """Start `world_size` workers that will join the channel at `address`.

    Args:
        environment: variables of the experiment, over those of this process.

    Raises:
        LaunchError: a process or its log cannot be created.
    """
    base = {**os.environ, **environment}
    base.update(
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(_free_port()),
        PYTHONUNBUFFERED="1",
        # DeepSpeed calls ninja by name; an environment that is not activated has it off the path.
        PATH=os.pathsep.join([str(Path(sys.executable).parent), base.get("PATH", os.defpath)]),
        TRIALFLOW_CHANNEL=address,
        TRIALFLOW_CHANNEL_SECRET=secret.hex(),
    )
    if count_accelerators(base) == 0:
        base["DS_ACCELERATOR"] = "cpu"
        base.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world_size)))
    ranks: list[RankProcess] = []
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        for rank in range(world_size):
            log_path = log_dir / f"rank-{rank}.log"
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TRIALFLOW_LOG": str(log_path)}
            with log_path.open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", WORKER_MODULE],
                    env={**base, **own},
                    cwd=working_dir,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            ranks.append(RankProcess(rank, process, log_path))
    except OSError as error:
        for started in ranks:
            started.kill()
            started.process.wait()
        raise LaunchError(f"cannot start rank {len(ranks)} in {working_dir}: {error}") from error
    return ranks


def _free_port() -> int:
    """A port for the ranks' rendezvous, below those that outgoing connections take."""
    candidates = random.SystemRandom().sample(range(20000, 30000), 50)
    for port in candidates:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise LaunchError("no free TCP port between 20000 and 30000 for the ranks' rendezvous")
