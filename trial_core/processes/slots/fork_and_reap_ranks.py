"""Starts a driver's ranks on this machine, and ends them when the driver ends.

    python -m trial_core.processes.slots.fork_and_reap_ranks CONTROL DRIVER_PID [MODULE ...]

It imports the modules once and forks each rank, so that a rank does not take seconds to import
PyTorch and DeepSpeed, and all ranks share the memory of the imported modules. It has one thread and
uses no device. If an import fails, or has used a device, ranks become new interpreters instead.

CONTROL is the descriptor of a socket to the driver. A rank cannot always notice its driver's end by
itself: it may be stopped, or in native code that holds the interpreter lock. This process notices
it, and kills the ranks. It also keeps memory files of ranks that have ended
(`trial_core.processes.slots.kept_memory`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Sequence
from functools import partial

import msgspec

from trial_core.common.decoding import decoder
from trial_core.processes.slots import rank_main
from trial_core.processes.slots.addresses import STORE_SOCKET_VARIABLE
from trial_core.processes.slots.device_locks import (
    DESCRIPTORS_VARIABLE,
    keep_locks,
    lock_descriptors,
)
from trial_core.processes.slots.kept_memory import KEEPER_VARIABLE, Keeper

MESSAGE_BYTES = 2**16
DESCRIPTORS = 253
"""The most descriptors of a message, Linux's limit."""
# How often to ask whether the driver is still the parent: a process that the driver has forked
# holds the other end of the control socket, too.
POLL_SECONDS = 1.0
STARTED_IN = os.getcwd()  # later it may be gone: code folders are moved and made again
IGNORED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StartRank(msgspec.Struct, tag=True):
    """Fork a rank, in a working directory, with environment variables that only it gets.

    Descriptors of its standard input, its log, the locks of its devices and its store come with the
    message. `number` names the rank in later messages.
    """

    number: int
    variables: dict[str, str]
    folder: str


class SignalRank(msgspec.Struct, tag=True):
    """Send a rank a signal, unless it has ended. SIGKILL also ends the processes of its session."""

    number: int
    signal: int


class FreeMemory(msgspec.Struct, tag=True):
    """Keep no memory files of ranks that have ended: see `kept_memory`."""


class Ready(msgspec.Struct, tag=True):
    """The modules are imported."""


class RankStarted(msgspec.Struct, tag=True):
    number: int
    pid: int


class RankEnded(msgspec.Struct, tag=True):
    """A rank and all processes of its session have ended; `code` is as in `subprocess`."""

    number: int
    code: int


Command = StartRank | SignalRank | FreeMemory
ForkEvent = Ready | RankStarted | RankEnded


class Server:
    """Carries out the driver's commands until the driver ends."""

    def __init__(self, control: socket.socket, driver: int) -> None:
        self._control = control
        self._driver = driver
        self._ranks: dict[int, int] = {}
        self._can_use_imported = True
        self._keeper = Keeper()
        # Wakes `select` when a child has ended.
        self._wakeup, self._wakeup_end = socket.socketpair()
        for end in (self._wakeup, self._wakeup_end):
            end.setblocking(False)
        # A machine that shuts down signals all processes; the driver then has the ranks save.
        for number in IGNORED_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wakeup_end.fileno())

    def preload(self, modules: Sequence[str]) -> None:
        """Import the modules. A rank that cannot use them imports them itself, and reports why."""
        try:
            for module in modules:
                importlib.import_module(module)
        except Exception:  # noqa: BLE001 - each rank imports it again, and reports it
            traceback.print_exc()
            self._can_use_imported = False
        gc.collect()
        gc.freeze()  # else a collection in a rank would copy the pages of all imported modules
        self._tell(Ready())

    def serve(self) -> Callable[[], None] | None:
        """Carry out commands until the driver ends, then kill the ranks; return None.

        In each forked rank it also returns: a call of `become_rank` with the rank's data.
        """
        poll = select.poll()  # not `select`, which knows only descriptors below 1024
        for end in (self._control, self._wakeup, self._keeper.inbox):
            poll.register(end, select.POLLIN)
        while True:
            readable = {descriptor for descriptor, _ in poll.poll(POLL_SECONDS * 1000)}
            if self._wakeup.fileno() in readable:
                with contextlib.suppress(BlockingIOError):
                    self._wakeup.recv(MESSAGE_BYTES)
                self._reap()
            if self._keeper.inbox.fileno() in readable:  # before a later rank is forked
                self._keeper.receive()
            if self._control.fileno() in readable:
                data, descriptors = self._receive()
                if not data:
                    break
                command = decoder(Command).decode(data)
                if isinstance(command, SignalRank):
                    self._signal(command)
                elif isinstance(command, FreeMemory):
                    self._keeper.free()
                elif self._fork(command.number, descriptors) == 0:
                    self._leave_behind()
                    keeper = self._keeper.ranks_end.detach()
                    return partial(
                        become_rank, command, descriptors, keeper, self._can_use_imported
                    )
            elif not readable and os.getppid() != self._driver:
                break
        kill_sessions(self._ranks.values())
        return None

    def _receive(self) -> tuple[bytes, Sequence[int]]:
        """The next command, with its descriptors; no bytes if the driver has ended."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, DESCRIPTORS)
        except ConnectionError:  # it has not read all events before
            return b"", ()
        return data, descriptors

    def _signal(self, command: SignalRank) -> None:
        pid = self._ranks.get(command.number)
        if pid is None:
            return
        if command.signal == signal.SIGKILL:
            kill_sessions([pid])
        else:
            os.kill(pid, command.signal)

    def _fork(self, number: int, descriptors: Sequence[int]) -> int:
        """Fork a rank, which gets the descriptors. Return its process id, or 0 in the rank."""
        with warnings.catch_warnings():
            # Python warns of threads, which numpy's OpenBLAS has; it can be forked.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid != 0:
            for descriptor in descriptors:
                os.close(descriptor)
            self._ranks[number] = pid
            self._tell(RankStarted(number=number, pid=pid))
        return pid

    def _reap(self) -> None:
        for number, pid in list(self._ranks.items()):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
                continue
            # Its children may outlive it. Until it is reaped, no other session can have its id.
            kill_sessions([pid])
            _, status = os.waitpid(pid, 0)
            del self._ranks[number]
            self._tell(RankEnded(number=number, code=os.waitstatus_to_exitcode(status)))

    def _tell(self, event: ForkEvent) -> None:
        with contextlib.suppress(OSError):  # the driver has ended: `serve` notices it
            self._control.send(msgspec.json.encode(event))

    def _leave_behind(self) -> None:
        """Leave the session, the signal handlers and the sockets of the fork server."""
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (*IGNORED_SIGNALS, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for end in (self._control, self._wakeup, self._wakeup_end):
            end.close()
        self._keeper.leave_behind()


def become_rank(
    given: StartRank, descriptors: Sequence[int], keeper: int, can_use_imported: bool
) -> None:
    """Become a rank, in a process that was just forked.

    The descriptors came with the command; `keeper` is its socket to the keeper of memory files.
    """
    locks = len(lock_descriptors(given.variables))
    stdin, log, *store = *descriptors[:2], *descriptors[2 + locks :]
    for descriptor, number in ((stdin, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, number)
    os.close(stdin)
    os.close(log)
    os.environ.pop(DESCRIPTORS_VARIABLE, None)  # those of a run that has started this one
    os.environ.update(given.variables)
    if locks:
        os.environ[DESCRIPTORS_VARIABLE] = ",".join(map(str, descriptors[2 : 2 + locks]))
    os.environ[KEEPER_VARIABLE] = str(keeper)
    work_in(given.folder)
    if store:
        os.environ[STORE_SOCKET_VARIABLE] = str(store[0])
    if not can_use_imported or _has_used_a_device():
        for descriptor in (*descriptors[2:], keeper):
            os.set_inheritable(descriptor, True)
        os.execv(sys.executable, [sys.executable, "-m", rank_main.__name__])
    keep_locks()  # whose descriptors a forked process closes
    _fork_persister([*store, keeper])
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # Python's generator reseeds itself, and torch's is never random
    sys.argv[:] = [rank_main.__file__]
    rank_main.main()


def _fork_persister(unneeded: Sequence[int]) -> None:
    """Fork a rank's persister process, without these descriptors, if its modules are imported."""

    def prepare() -> None:
        for descriptor in unneeded:
            os.close(descriptor)
        rank_main.show_title(f"trialflow: persister of rank {os.environ['RANK']}")

    if (persister := sys.modules.get("trial_core.checkpoint.transfer.persister")) is not None:
        persister.fork_ahead(prepare)


def work_in(folder: str) -> None:
    """Change to a folder, and import modules from there, as if Python had been started there."""
    os.chdir(folder)
    if sys.path[:1] == [STARTED_IN]:
        sys.path[0] = os.getcwd()


def _has_used_a_device() -> bool:
    """True if this process cannot use devices, since its parent has used one."""
    torch = sys.modules.get("torch")
    return torch is not None and any(
        getattr(getattr(torch, kind, None), "_is_in_bad_fork", bool)() for kind in ("cuda", "xpu")
    )


def kill_sessions(leaders: Collection[int]) -> None:
    """SIGKILL ranks, each of which leads a session, and all processes of their sessions.

    Their process groups would not do: ninja gives each compiler a separate group. Does not wait for
    processes to end, except that one may start another meanwhile. The ranks must not be reaped
    meanwhile: another process could get the same id.
    """
    for leader in leaders:
        # A rank that was just forked does not lead a session yet.
        for kill in (os.kill, os.killpg):
            with contextlib.suppress(OSError):
                kill(leader, signal.SIGKILL)
    killed: set[int] = set()
    while members := _live_members(leaders) - killed:
        for pid in members:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        killed |= members


def _live_members(leaders: Collection[int]) -> set[int]:
    """The processes of these sessions that have not ended; none where /proc does not exist."""
    found = set()
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{int(name)}/stat", "rb") as file:
                # 4242 (name) S parent group session …
                state, _, _, session = file.read().rpartition(b")")[2].split()[:4]
            if int(session) in leaders and state not in (b"Z", b"X"):
                found.add(int(name))
    return found


def main() -> None:
    control, driver, *modules = sys.argv[1:]
    server = Server(socket.socket(fileno=int(control)), int(driver))
    server.preload(modules)
    if (rank := server.serve()) is not None:
        rank()


if __name__ == "__main__":
    main()
