"""A rank that the driver has not started: a user's process joins a driver for one run.

torchrun, `deepspeed`, srun, plain python or a notebook has started the process. It serves the
driver's requests within a call, as `rank_main` does in a rank's process. The call returns, or
raises the error of its workload. If another rank, another machine or the driver has failed, the
call raises that first cause.

The main thread may be in a collective that never completes when the run fails, and cannot raise
there. Then the process ends after a few seconds. A process that a person uses, such as a notebook's
kernel, is never ended: it raises when the collective returns.

SIGTERM and Ctrl-C within the call ask the driver to end the run with a checkpoint. A later Ctrl-C
raises KeyboardInterrupt.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trial_core.errors import RankFailed, SlotsError, TrialflowError
from trial_core.messages import (
    Answer,
    AnyRequest,
    AnyResult,
    BytesWritten,
    Hello,
    Invitation,
    Shutdown,
    StopRequested,
)
from trial_core.processes.slots.connection import RankConnection
from trial_core.processes.slots.fork_server import disk_bytes
from trial_core.processes.slots.rank_server import RankServer, Workloads, to_rank_error
from trial_core.processes.slots.rank_signals import RankSignals
from trial_core.processes.slots.stacks import register_stack_dump, stack_log
from trial_core.processes.slots.stop_barrier import Position
from trial_core.schedule.stop_requests import StopReason

WATCH_SECONDS = 5.0
"""How often to report the bytes that this rank has written."""
CAUSE_SECONDS = 5.0
"""How long a rank that has failed waits for the driver to say which rank failed first."""
END_SECONDS = 5.0
"""How long a rank of a run that has failed may take to raise before its process ends."""

SAME_CTRL_C_SECONDS = 1.0
"""One Ctrl-C may arrive twice: from the terminal, and from a launcher that forwards it."""

REASONS: dict[int, StopReason] = {signal.SIGTERM: "preempted", signal.SIGINT: "interrupted"}

logger = logging.getLogger(__name__)
driver_logger = logging.getLogger("trial_core.driver")
"""Gets the driver's log, on rank 0."""


class JoinedRank:
    """A rank's part of one run. A context manager: the rank leaves at the end of the block.

    Within the block, SIGTERM and Ctrl-C are reported to the driver, if the block is in the main
    thread; or from `handle_signals` on. An error that ends the block is reported, too.

    Args:
        is_interactive: True if a person uses this process; None: if Python is interactive.
        handles_signals: True to handle signals from the beginning of the block on.

    Raises:
        SlotsError: the driver cannot be reached.
    """

    def __init__(
        self,
        invitation: Invitation,
        rank: int,
        is_interactive: bool | None = None,
        handles_signals: bool = True,
    ) -> None:
        self._rank = rank
        self._handles_signals = handles_signals
        if is_interactive is None:
            is_interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)  # ps1: a notebook
        self._is_interactive = is_interactive
        hello = Hello(
            rank=rank, pid=os.getpid(), host=socket.gethostname(), is_interactive=is_interactive
        )
        self._connection, is_here = _join(invitation, hello)
        self._server = RankServer(
            self._connection, self._end, logs_errors=False,
            on_log=driver_logger.log if rank == 0 else lambda level, text: None,
        )  # fmt: skip
        self.send = self._server.send
        self.stop_barrier = self._server.stop_barrier
        self.receipts = self._server.receipts
        self._workloads: _EndableWorkloads | None = None
        self._on_failure: Callable[[TrialflowError], None] = lambda error: None
        self._signals = RankSignals(self._handle_signal)
        self._interrupted_at: float | None = None
        self._lock = threading.Lock()
        self._error: TrialflowError | None = None
        self._has_ended = threading.Event()
        self._has_left = threading.Event()
        self._has_reported = False
        self._is_over = False
        self._stacks = _register_stacks(Path(invitation.log_dir), rank) if is_here else None

    def __enter__(self) -> JoinedRank:
        if self._handles_signals:
            self.handle_signals()
        threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and not self._has_reported and not self._is_over:
            self.send(Answer(number=0, error=to_rank_error(error)))
        with self._lock:
            self._is_over = True
        self._has_left.set()
        self._signals.__exit__(kind, error, traceback)
        self._server.close()
        if self._stacks is not None:
            register_stack_dump()
            os.close(self._stacks)

    def handle_signals(self) -> None:
        """Report SIGTERM and Ctrl-C from now on, until the end of the block. Called once."""
        self._signals.__enter__()

    def serve(
        self,
        workloads: Workloads,
        on_failure: Callable[[TrialflowError], None] = lambda error: None,
    ) -> None:
        """Serve the driver's requests until it says that the run is over. Called once.

        The calling thread is the compute lane. The main thread raises even while a workload is in
        Python code; another thread raises at the workload's next step.

        Args:
            on_failure: called in another thread if the run has failed elsewhere, perhaps while a
                workload still runs.

        Raises:
            Exception: of a workload of this rank, if that is the first cause.
            RankFailed: another rank has failed.
            KeyboardInterrupt: a later Ctrl-C.
            SlotsError: the driver is gone, or has ended the ranks for another reason.
            TrialflowError: an error of the driver's part of the run.
        """
        self._on_failure = on_failure
        self._workloads = _EndableWorkloads(workloads, lambda: self._error)
        self._server.start(self._workloads)
        while (envelope := self._server.next_request()) is not None:
            if is_over := isinstance(envelope.request, Shutdown):
                self._is_over = True  # the driver's next steps are not a failure
            raised = self._server.answer(envelope)
            if raised is not None:
                self._has_reported = True
                if not is_over and not isinstance(raised, KeyboardInterrupt):
                    self._has_ended.wait(CAUSE_SECONDS)
                self._raise(raised)
            if is_over:
                return
        self._has_reported = True  # the driver knows it
        self._raise(self._server.raised)

    def _raise(self, raised: BaseException | None) -> None:
        """Raise the run's error, or this rank's exception if the driver names no other cause."""
        error = self._error
        is_own = isinstance(error, RankFailed) and error.rank == self._rank
        if raised is not None and (error is None or is_own):
            raise raised
        if error is not None:
            raise error from (None if raised is error else raised)

    # ---------------------------------------------------------------------- in other threads

    def _end(self, error: TrialflowError) -> None:
        """The run has failed elsewhere. Called in any thread, perhaps several times."""
        with self._lock:
            if self._is_over or self._error is not None:
                return
            self._error = error
        self._has_ended.set()
        self._server.end()
        threading.Thread(target=self._end_call, args=(error,), name="rank-end", daemon=True).start()

    def _end_call(self, error: TrialflowError) -> None:
        """Have the main thread raise; if it cannot, end the process."""
        self._on_failure(error)
        self.stop_barrier.pause()
        self.stop_barrier.resume_until(Position(0, 0))  # the next step does not begin
        self._signals.interrupt()
        if not self._has_left.wait(END_SECONDS) and not self._is_interactive:
            logger.error("this rank ends, because its main thread hangs: %s", error)
            os._exit(1)

    def _watch(self) -> None:
        told = 0
        while (numbers := self._signals.wait(WATCH_SECONDS)) is not None:
            for number in numbers:
                if self._error is None:
                    name = signal.Signals(number).name
                    self.send(StopRequested(reason=REASONS[number], detail=name))
            if (count := _written_bytes()) > told:
                told = count
                self.send(BytesWritten(count=count))

    # --------------------------------------------------------------------- in the main thread

    def _handle_signal(self, number: int) -> None:
        if self._error is not None:
            if self._workloads is not None:
                self._workloads.end_if_due()
        elif number == signal.SIGINT:
            now = time.monotonic()
            self._interrupted_at = self._interrupted_at or now
            if now - self._interrupted_at > SAME_CTRL_C_SECONDS:
                raise KeyboardInterrupt


class _EndableWorkloads(Workloads):
    """Workloads of which the one in the compute lane can be ended from outside, by an error."""

    def __init__(self, workloads: Workloads, error: Callable[[], TrialflowError | None]) -> None:
        self._workloads = workloads
        self._error = error
        self._is_computing = False

    @property
    def batches_trained(self) -> int | None:
        return self._workloads.batches_trained

    def carry_out(self, request: AnyRequest) -> AnyResult:
        if request.lane == "io":
            return self._workloads.carry_out(request)
        self._is_computing = True
        try:
            self.end_if_due()  # it may just have been called, and have found no workload
            return self._workloads.carry_out(request)
        finally:
            self._is_computing = False

    def close(self) -> None:
        self._workloads.close()

    def end_if_due(self) -> None:
        """Raise the error within the workload, if there are both. Called in its thread."""
        if self._is_computing and (error := self._error()) is not None:
            raise error


def _join(invitation: Invitation, hello: Hello) -> tuple[RankConnection, bool]:
    """A connection to the driver, and whether the driver is on this machine.

    Other machines may see the path of its socket, but nothing listens there.
    """
    if Path(invitation.path).exists():
        try:
            return RankConnection(invitation.path, invitation.secret, hello), True
        except SlotsError:
            if invitation.address is None:
                raise
    if invitation.address is None:
        raise SlotsError(
            f"rank {hello.rank} cannot join its driver: it has ended, or it is on another machine "
            f"than {hello.host} and listens on its own machine alone"
        )
    return RankConnection(invitation.address, invitation.secret, hello), False


def _register_stacks(folder: Path, rank: int) -> int | None:
    """Have a signal of the driver's write this process's stacks to the file made by the driver.

    Returns the file's descriptor, if it is here. The handler stays for good; else a late signal
    would end the process.
    """
    try:
        descriptor = os.open(stack_log(folder, rank), os.O_WRONLY | os.O_APPEND)
    except OSError:  # a container that shares the socket alone
        register_stack_dump()
        return None
    register_stack_dump(descriptor)
    return descriptor


def _written_bytes() -> int:
    """A number that grows when this process writes to a disk, or to files as stdout or stderr."""
    logged = 0
    for number in (1, 2):
        with suppress(OSError):  # closed, as a daemon's
            stream = os.fstat(number)
            logged += stream.st_size if stat.S_ISREG(stream.st_mode) else 0
    return disk_bytes(os.getpid()) + logged
