"""The process of every slot: forked by a fork server, or ``python -m trial_core.slots.rank_main``.

The main thread is the compute lane: one workload at a time, collectives allowed. A background
thread is the I/O lane: no collectives. A rank that loses its driver ends; the fork server kills its
children, and the rank if it does not notice.

The whole route of a stop: `trial_core/run/stop_requests.py`.

Standard input: the channel's secret. Environment: torchrun's RANK, LOCAL_RANK, WORLD_SIZE,
MASTER_ADDR, MASTER_PORT; TRIALFLOW_CHANNEL; TRIALFLOW_LOG, the path of this rank's log, if it has
one; on rank 0 TRIALFLOW_STORE_SOCKET (see `trial_core/rendezvous.py`); where runs share devices
TRIALFLOW_DEVICE_LOCKS (see `trial_core/slots/device_locks.py`); TRIALFLOW_KEEPER (see
`trial_core/slots/kept_memory.py`).
"""

from __future__ import annotations

import logging
import os
import queue
import runpy
import signal
import socket
import sys
import threading
import traceback
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import msgspec
from setproctitle import setproctitle

from trial_core.config.command import is_command
from trial_core.errors import SlotsError, TrialflowError
from trial_core.messages import (
    Answer,
    AnyRequest,
    AnyResult,
    BuildTrial,
    Done,
    Envelope,
    FromDriver,
    Hello,
    Message,
    PauseSteps,
    Ping,
    RankError,
    ResumeUntil,
    Shutdown,
    StepsPaused,
    StopRequested,
    decode_from_driver,
)
from trial_core.slots.announcer import Announcer
from trial_core.slots.connection import RankConnection
from trial_core.slots.device_locks import keep_inherited_locks
from trial_core.slots.framing import ProtocolError
from trial_core.slots.kept_memory import connect_keeper
from trial_core.slots.log_pump import LogPump
from trial_core.slots.stacks import register_stack_dump
from trial_core.slots.stop_barrier import Position, StopBarrier

if TYPE_CHECKING:
    from trial_core.controller.controller import Controller
    from trial_core.core.script_controller import ScriptController

logger = logging.getLogger(__name__)

TRIAL_MODULES = (
    "trial_core.controller.controller",
    "trial_core.entrypoint",
    "trial_core.controller.first_use",
)
"""What a trial's ranks import, with PyTorch and DeepSpeed; a fork server can do it for them."""
SCRIPT_MODULES = ("trial_core.core.script_controller",)
"""What the ranks of a Core API script import."""

RUNPY = (runpy.__file__, "<frozen runpy>")
"""The files of the frames through which a Core API script is run."""


class Rank:
    """One rank: its connection, its two lanes and its controller."""

    def __init__(self, connection: RankConnection, rank: int) -> None:
        self._connection = connection
        self._announcer = Announcer(self.send, is_silent=rank != 0)
        self._controller: Controller | ScriptController | None = None
        self._runs_script = False
        self._stop_barrier = StopBarrier()
        self._lanes: dict[str, queue.SimpleQueue[Envelope]] = {
            "compute": queue.SimpleQueue(),
            "io": queue.SimpleQueue(),
        }

    def run(self) -> None:
        """Serve requests until `Shutdown`. Called on the main thread."""
        threading.Thread(target=self._receive, name="channel", daemon=True).start()
        threading.Thread(target=self._serve_io, name="io-lane", daemon=True).start()
        while True:
            envelope = self._lanes["compute"].get()
            self._answer(envelope)
            if isinstance(envelope.request, Shutdown):
                return

    def send(self, message: Message) -> None:
        """Send to the driver; if the driver is gone, end this rank."""
        try:
            self._connection.send(message)
        except OSError:
            end_rank("the driver is gone")

    def _receive(self) -> None:
        try:
            while True:
                self._dispatch(decode_from_driver(self._connection.receive()))
        except (EOFError, OSError):
            end_rank("the driver is gone")
        except (msgspec.MsgspecError, ProtocolError) as error:
            end_rank(f"the driver sent an invalid message: {error}")

    def _dispatch(self, message: FromDriver) -> None:
        if isinstance(message, PauseSteps):
            at = self._stop_barrier.pause()
            self.send(StepsPaused(workload=at.workload, steps=at.steps))
        elif isinstance(message, ResumeUntil):
            self._stop_barrier.resume_until(Position(message.workload, message.steps))
        else:
            self._lanes[message.request.lane].put(message)

    def _serve_io(self) -> None:
        while True:
            self._answer(self._lanes["io"].get())

    def _answer(self, envelope: Envelope) -> None:
        number, name = envelope.number, envelope.request.title
        try:
            answer = Answer(number=number, result=self._carry_out(envelope))
        except (Exception, SystemExit) as error:  # the lane's top frame: the driver reports it
            logger.exception("%s failed", name)
            trained = None if self._controller is None else self._controller.batches_trained
            answer = Answer(number=number, error=to_rank_error(error, trained))
        try:
            self.send(answer)
        except (TypeError, ValueError, OverflowError, ProtocolError) as error:
            logger.exception("cannot send the result of %s", name)
            self.send(Answer(number=number, error=to_rank_error(error)))

    def _carry_out(self, envelope: Envelope) -> AnyResult:
        request = envelope.request
        if isinstance(request, Ping):
            return Done()
        if isinstance(request, Shutdown):
            if self._controller is not None:
                self._controller.close()
            return Done()
        return self._controller_for(request).carry_out(request)

    def _controller_for(self, request: AnyRequest) -> Controller | ScriptController:
        if isinstance(request, BuildTrial):
            runs_script = is_command(str(request.experiment["entrypoint"]))
            if self._controller is not None and runs_script != self._runs_script:
                self._controller.close()
                self._controller = None
            self._runs_script = runs_script
        if self._controller is None:
            self._controller = self._script_controller() if self._runs_script else self._trials()
        return self._controller

    # Late imports: in a rank without a fork server they take seconds, and it must join first.

    def _trials(self) -> Controller:
        with self._announcer.doing("importing PyTorch and DeepSpeed"):
            from trial_core.controller.controller import Controller
            from trial_core.entrypoint import build_engine

        return Controller(
            partial(build_engine, doing=self._announcer.doing),
            emit=self.send,
            stop_barrier=self._stop_barrier,
            on_stop_requested=lambda: self.send(StopRequested()),
        )

    def _script_controller(self) -> ScriptController:
        with self._announcer.doing("importing PyTorch"):
            from trial_core.core.script_controller import ScriptController

        return ScriptController(self.send, self._stop_barrier)


def to_rank_error(error: BaseException, batches_trained: int | None = None) -> RankError:
    """An exception as plain data; its traceback begins with the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    library = str(Path(__file__).resolve().parents[1])
    first_user_frame = next(
        (i for i, f in enumerate(frames) if not f.filename.startswith((library, *RUNPY))), 0
    )
    report = traceback.TracebackException.from_exception(error)
    report.stack = traceback.StackSummary.from_list(frames[first_user_frame:])
    return RankError(
        error_type=type(error).__name__,
        is_ours=isinstance(error, TrialflowError),
        message=_encodable(str(error)),
        traceback=_encodable("".join(report.format())),
        batches_trained=batches_trained,
    )


def _encodable(text: str) -> str:
    """`text` without lone surrogates (of undecodable file names), which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def end_rank(reason: str) -> None:
    """End this rank at once. Its children are killed by the fork server."""
    logger.error("this rank ends: %s", reason)
    os._exit(1)


def read_secret() -> bytes:
    """The channel's secret, from standard input. No child inherits the pipe."""
    secret = sys.stdin.buffer.read()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    return secret


def ignore_stop_signals() -> None:
    """Ignore SIGTERM and SIGINT in this rank, but not in its forked children.

    A machine that shuts down signals all processes. The driver gets the signal, too: it has the
    ranks save, and then shuts them down.
    """

    def ignore(number: int, frame: FrameType | None) -> None:
        """A handler, because programs that this rank starts would inherit SIG_IGN."""

    before = {each: signal.signal(each, ignore) for each in (signal.SIGTERM, signal.SIGINT)}

    def in_child() -> None:
        for each, handler in before.items():
            signal.signal(each, handler)

    os.register_at_fork(after_in_child=in_child)


def show_title(title: str) -> None:
    """Have ``ps``, ``top`` and ``nvidia-smi`` show what this process is."""
    # So that it leaves the memory of the environment alone, which ``ps e`` shows.
    os.environ["SPT_NOENV"] = "1"
    setproctitle(title)
    del os.environ["SPT_NOENV"]


def main() -> None:
    """Join the driver and serve its requests."""
    rank = int(os.environ["RANK"])
    show_title(f"trialflow: rank {rank} of {os.environ['WORLD_SIZE']}")
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s [rank {rank}] %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    register_stack_dump()
    ignore_stop_signals()
    keep_inherited_locks()
    connect_keeper()
    hello = Hello(rank=rank, pid=os.getpid(), host=socket.gethostname())
    try:
        connection = RankConnection(os.environ["TRIALFLOW_CHANNEL"], read_secret(), hello)
    except SlotsError as error:
        sys.exit(f"rank {rank} cannot join its driver: {error}")
    # A forked child must not keep the connection open after the rank has ended.
    os.register_at_fork(after_in_child=connection.close)
    this_rank = Rank(connection, rank)
    log = os.environ.get("TRIALFLOW_LOG")
    pump = LogPump(Path(log), rank, this_rank.send) if log else None
    this_rank.run()
    if pump is not None:
        pump.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not `sys.exit`: threads and atexit hooks of libraries may hang. The controller is closed.
    os._exit(0)


if __name__ == "__main__":
    main()
