"""The driver's handle on the fork server: the process that starts and ends this machine's ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from trial_core.common.decoding import decoder
from trial_core.processes.machine.accelerators import KIND_VARIABLE
from trial_core.processes.slots import fork_and_reap_ranks
from trial_core.processes.slots.fork_and_reap_ranks import (
    MESSAGE_BYTES,
    Command,
    ForkEvent,
    FreeMemory,
    RankEnded,
    RankStarted,
    Ready,
    SignalRank,
    StartRank,
    kill_sessions,
)
from trial_core.processes.slots.rank_handle import RankHandle

PRELOADED_KINDS = ("cpu", "cuda")
"""Accelerators that a forked process can use if its parent has not used one."""

logger = logging.getLogger(__name__)


class RankProcess(RankHandle):
    """A rank that the fork server starts and watches. `number` is the rank's number in the server.

    The process itself is watched, since its forked children hold copies of its connection.
    """

    def __init__(
        self,
        rank: int,
        log_path: Path,
        server: ServerProcess,
        number: int,
        on_exit: Callable[[int, int], None],
    ) -> None:
        super().__init__(rank, socket.gethostname(), log_path, on_exit)
        self._server = server
        self.number = number

    def signal(self, number: int) -> None:
        self._server.signal(self.number, number)

    def written_bytes(self) -> int:
        return disk_bytes(self.pid) + self.log_size()


def disk_bytes(pid: int | None) -> int:
    """The bytes that a process has written to disks; 0 if Linux does not report them.

    ``wchar`` would also count writes to pipes and sockets.
    """
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    counted = next((line for line in lines if line.startswith("write_bytes:")), "write_bytes: 0")
    return int(counted.partition(":")[2])


class ForkServer(contextlib.AbstractContextManager["ForkServer"]):
    """Starts ranks on this machine, for one slot group at a time. A context manager.

    Its process starts before the first rank, and stays for the ranks of later slot groups that have
    the same environment. When this process ends, also by SIGKILL, it ends the ranks.

    It imports the `preload` modules before it forks ranks, for the CPU and for CUDA devices. They
    read no variable whose name begins as `late` says, so such may be set later.
    """

    def __init__(self, preload: Sequence[str] = (), late: Sequence[str] = ()) -> None:
        self._preload = tuple(preload)
        self._late = tuple(late)
        self._process: ServerProcess | None = None

    def __exit__(self, *error: object) -> None:
        self.close()

    def prepare(
        self, environment: Mapping[str, str], working_dir: Path, log: Path
    ) -> ServerProcess:
        """A process with these variables, made by `rank_environment`. Returns at once.

        A new process starts in the working directory, and its modules write to the log. Raises
        OSError if it cannot be started.
        """
        if self._process is None or not self._process.serves(environment, self._late):
            self.close()
            can_preload = environment[KIND_VARIABLE] in PRELOADED_KINDS
            modules = self._preload if can_preload else ()
            self._process = ServerProcess(environment, working_dir, log, modules)
        return self._process

    def free_memory(self) -> None:
        """Have the process keep no memory of ranks that have ended."""
        if self._process is not None:
            self._process.free_memory()

    def close(self) -> None:
        """End the process, and ranks that still run."""
        if self._process is not None:
            self._process.close()
            self._process = None


class ServerProcess:
    """One process of the fork server, with the ranks that it has started."""

    def __init__(
        self, environment: Mapping[str, str], working_dir: Path, log: Path, modules: Sequence[str]
    ) -> None:
        self._environment = dict(environment)
        self._set_late: dict[str, str] = {}
        self._lock = threading.Lock()
        self._ranks: list[RankProcess] = []
        self._is_ready = False
        self._is_closing = False
        self._code: int | None = None
        # Keeps the boundaries of messages, with which descriptors come.
        self._control, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with other_end, log.open("ab") as output:
                self._process = subprocess.Popen(
                    [
                        sys.executable, "-m", fork_and_reap_ranks.__name__,
                        str(other_end.fileno()), str(os.getpid()), *modules,
                    ],
                    env=self._environment,
                    cwd=working_dir,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=[other_end.fileno()],
                )  # fmt: skip
        except OSError:
            self._control.close()
            raise
        self._listener = threading.Thread(target=self._listen, name="fork-server", daemon=True)
        self._listener.start()

    def serves(self, environment: Mapping[str, str], late: tuple[str, ...]) -> bool:
        """Return whether it can start ranks with these variables; ranks get late ones at start."""
        before = self._environment
        changed = dict(environment.items() - before.items())
        with self._lock:
            if self._code is not None or not before.keys() <= environment.keys():
                return False
            self._set_late = changed
        return all(name.startswith(late) for name in changed)

    def new_rank(
        self, rank: int, log_path: Path, on_exit: Callable[[int, int], None]
    ) -> RankProcess:
        process = RankProcess(rank, log_path, self, len(self._ranks), on_exit)
        self._ranks.append(process)
        return process

    def start(
        self,
        rank: RankProcess,
        variables: Mapping[str, str],
        folder: Path,
        descriptors: Sequence[int],
    ) -> None:
        """Have a rank forked, with the fields of `StartRank`. Returns at once."""
        given = {**self._set_late, **variables}
        command = StartRank(number=rank.number, variables=given, folder=str(folder))
        self._send(command, descriptors)
        with self._lock:
            code = self._code
        if code is not None:  # `_listen` may have seen this rank, or not
            rank.ended(code)

    def signal(self, number: int, signal_number: int) -> None:
        """Send a rank a signal; SIGKILL also ends its children."""
        if signal_number == signal.SIGKILL and not self._is_ready:
            # It still imports, and would answer later. No rank was forked.
            self._process.kill()
        else:
            self._send(SignalRank(number=number, signal=signal_number))

    def free_memory(self) -> None:
        self._send(FreeMemory())

    def close(self) -> None:
        self._is_closing = True
        self._process.kill()
        self._listener.join()

    def _send(self, command: Command, descriptors: Sequence[int] = ()) -> None:
        with contextlib.suppress(OSError):  # it has ended: `_listen` notices it
            socket.send_fds(self._control, [msgspec.json.encode(command)], descriptors)

    def _listen(self) -> None:
        while data := self._receive():
            event = decoder(ForkEvent).decode(data)
            if isinstance(event, Ready):
                self._is_ready = True
            elif isinstance(event, RankStarted):
                self._ranks[event.number].pid = event.pid
            elif isinstance(event, RankEnded):
                self._ranks[event.number].ended(event.code)
        self._end_ranks(self._process.wait())
        self._control.close()

    def _receive(self) -> bytes:
        try:
            return self._control.recv(MESSAGE_BYTES)
        except OSError:
            return b""

    def _end_ranks(self, code: int) -> None:
        """End the ranks that this process has left behind."""
        with self._lock:
            self._code = code
        left = [rank for rank in self._ranks if not rank.wait(0)]
        if left and self._is_ready and not self._is_closing:
            logger.error(
                "the fork server (process %d) ended with code %d; its ranks are killed",
                self._process.pid, code,
            )  # fmt: skip
        kill_sessions([rank.pid for rank in left if rank.pid is not None])
        for rank in left:
            rank.ended(code if rank.pid is None else -signal.SIGKILL)
