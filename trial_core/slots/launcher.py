"""Starts rank processes on this machine; they join the channel by themselves.

Each rank gets torchrun's environment variables, its own process group (a terminal's Ctrl-C and a
Prefect worker's SIGTERM must reach only the driver), and a log file as stdout and stderr (a rank
with the driver's stdout would keep it open).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trial_core.errors import LaunchError
from trial_core.slots.accelerators import KIND_VARIABLE, available_cores, visible_accelerators
from trial_core.slots.device_locks import inherited_locks
from trial_core.slots.watchdog import Watchdog
from trial_core.slots.watchdog_main import kill_sessions

WORKER_MODULE = "trial_core.slots.rank_main"
STORE_SOCKET_VARIABLE = "TRIALFLOW_STORE_SOCKET"
"""The number of the descriptor on which rank 0 hosts torch.distributed's store."""
LOOPBACK_ADDRESS = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"


class RankProcess:
    """A rank process that this process has started and watches.

    The process is watched, not only its connection: its forked children hold copies of that.

    Args:
        watchdog: kills the rank and its children if this process ends.
        on_exit: called with rank and return code when the process and all its children have
            ended, in the thread that watches it.
    """

    def __init__(
        self,
        rank: int,
        process: subprocess.Popen[bytes],
        log_path: Path,
        watchdog: Watchdog,
        on_exit: Callable[[int, int], None],
    ) -> None:
        self.rank = rank
        self.log_path = log_path
        self._process = process
        self._watchdog = watchdog
        self._on_exit = on_exit
        self._reaping = threading.Lock()
        self._ended = threading.Event()
        watchdog.watch(self.pid)
        threading.Thread(target=self._watch, name=f"watch-rank-{rank}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Its process id, and that of its process group."""
        return self._process.pid

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until the rank and its children have ended. Return whether they have."""
        return self._ended.wait(timeout_seconds)

    def kill(self) -> None:
        """SIGKILL the rank and its children (data loader workers, compilers)."""
        with self._reaping:
            # Not after it is reaped: another process may have its id by then.
            if self._process.returncode is None:
                kill_sessions({self.pid})

    def signal(self, number: int) -> None:
        """Send the rank a signal, if it still runs."""
        with self._reaping:
            if self._process.returncode is None:
                os.kill(self.pid, number)

    def log_size(self) -> int:
        """The size of the rank's log in bytes."""
        return self.log_path.stat().st_size

    def log_from(self, start: int) -> str:
        """The rank's log from byte `start`."""
        with self.log_path.open("rb") as log:
            log.seek(start)
            return log.read().decode(errors="replace")

    def written_bytes(self) -> int:
        """Grows when the rank writes to a disk, or when it or a child writes to its log."""
        try:
            logged_bytes = self.log_size()
        except OSError:  # the log was deleted
            logged_bytes = 0
        return _to_disk_bytes(self.pid) + logged_bytes

    def log_tail(self, lines: int = 20, limit_bytes: int = 16384) -> str:
        """The last lines of the rank's log."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, self.log_path.stat().st_size - limit_bytes))
                text = log.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def _watch(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._reaping:
            # Its children may outlive it. Until it is reaped, no other group can have its id.
            kill_sessions({self.pid})
            self._watchdog.forget(self.pid)
            code = self._process.wait()
        self._ended.set()
        self._on_exit(self.rank, code)


def _to_disk_bytes(pid: int) -> int:
    """How many bytes a process has written to disks; 0 if Linux does not report it.

    Not ``wchar``, which also counts writes to pipes and sockets.
    """
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    counted = next((line for line in lines if line.startswith("write_bytes:")), "write_bytes: 0")
    return int(counted.partition(":")[2])


def launch_ranks(
    world_size: int,
    *,
    address: str,
    secret: bytes,
    log_dir: Path,
    working_dir: Path,
    environment: Mapping[str, str],
    watchdog: Watchdog,
    on_exit: Callable[[int, int], None],
    ranks: list[RankProcess],
) -> None:
    """Start `world_size` workers that will join the channel at `address`.

    Args:
        environment: the experiment's variables; they override those of this process.
        watchdog: will watch the ranks.
        on_exit: called with a rank and its return code when it ends.
        ranks: each rank is added here as soon as it is started, so that none is lost.

    Raises:
        LaunchError: a process or its log cannot be created; `ranks` has those already started.
    """
    base = rank_environment(world_size, environment)
    base["TRIALFLOW_CHANNEL"] = address
    locks = inherited_locks(base)
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        # Bound here, so that no other process can take the port, and other machines cannot connect.
        with socket.create_server((LOOPBACK_ADDRESS, 0)) as store:
            base.update(MASTER_ADDR=LOOPBACK_ADDRESS, MASTER_PORT=str(store.getsockname()[1]))
            for rank in range(world_size):
                log_path = log_dir / f"rank-{rank}.log"
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TRIALFLOW_LOG": str(log_path)}
                if rank == 0:
                    own[STORE_SOCKET_VARIABLE] = str(store.fileno())
                inherited = [store.fileno()] if rank == 0 else []
                process = _start(
                    {**base, **own}, working_dir, log_path, secret, [*inherited, *locks]
                )
                ranks.append(RankProcess(rank, process, log_path, watchdog, on_exit))
    except OSError as error:
        raise LaunchError(f"cannot start rank {len(ranks)} in {working_dir}: {error}") from error


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


def loopback_collectives() -> dict[str, str]:
    """The variable that keeps gloo within this machine; empty without Linux's interface ``lo``."""
    if any(name == LOOPBACK_INTERFACE for _, name in socket.if_nameindex()):
        return {"GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE}
    return {}


def _start(
    environment: Mapping[str, str],
    working_dir: Path,
    log_path: Path,
    secret: bytes,
    inherited: Sequence[int],
) -> subprocess.Popen[bytes]:
    """Start a rank. It reads `secret` from its stdin: other processes see its environment."""
    reading, writing = os.pipe()
    with open(reading, "rb") as stdin, log_path.open("ab") as log:
        with open(writing, "wb") as pipe:
            pipe.write(secret)
        return subprocess.Popen(
            [sys.executable, "-m", WORKER_MODULE],
            env=environment,
            cwd=working_dir,
            stdin=stdin,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=inherited,
        )
