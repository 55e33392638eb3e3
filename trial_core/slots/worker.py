"""What runs in every slot: ``python -m trial_core.slots.worker``, started by any launcher.

It joins the driver's channel before anything else, so that its death is noticed from the first
moment, and only then imports torch. The main thread is the compute lane: one workload at a time,
collectives allowed. One background thread is the I/O lane: no collectives there. A rank that
loses its driver ends itself with all that it has started.

Environment: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT as torchrun sets them;
TRIALFLOW_CHANNEL, TRIALFLOW_CHANNEL_SECRET; TRIALFLOW_LOG, this rank's own log, when it has one.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from trial_core.errors import SlotsError, TrialflowError
from trial_core.messages import (
    Answer,
    AnyResult,
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
from trial_core.slots.connection import RankConnection
from trial_core.slots.framing import ProtocolError
from trial_core.slots.log_pump import LogPump
from trial_core.slots.stacks import dump_stacks_when_asked
from trial_core.slots.stop_barrier import Position, StopBarrier

if TYPE_CHECKING:
    from trial_core.controller.controller import Controller

logger = logging.getLogger(__name__)


class Worker:
    """One rank: its connection, its two lanes, and the controller that does the work."""

    def __init__(self, connection: RankConnection) -> None:
        self._connection = connection
        self._controller: Controller | None = None
        self._stop_barrier = StopBarrier()
        self._lanes: dict[str, queue.SimpleQueue[Envelope]] = {
            "compute": queue.SimpleQueue(),
            "io": queue.SimpleQueue(),
        }

    def run(self) -> None:
        """Serve until told to shut down. Called on the main thread."""
        threading.Thread(target=self._receive, name="channel", daemon=True).start()
        threading.Thread(target=self._serve_io, name="io-lane", daemon=True).start()
        while True:
            envelope = self._lanes["compute"].get()
            self._answer(envelope)
            if isinstance(envelope.request, Shutdown):
                return

    def send(self, message: Message) -> None:
        """Send to the driver; a driver that is gone ends this rank."""
        try:
            self._connection.send(message)
        except OSError:
            end_now("the driver is gone")

    def _receive(self) -> None:
        try:
            while True:
                self._hear(decode_from_driver(self._connection.receive()))
        except (EOFError, OSError):
            end_now("the driver is gone")
        except msgspec.MsgspecError as error:
            end_now(f"the driver sent something that is no request: {error}")

    def _hear(self, message: FromDriver) -> None:
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
        number, name = envelope.number, type(envelope.request).__name__
        try:
            answer = Answer(number=number, result=self._carry_out(envelope))
        except (Exception, SystemExit) as error:  # the lane's top frame: the driver is told all
            logger.exception("workload %s failed", name)
            answer = Answer(number=number, error=describe(error))
        try:
            self.send(answer)
        except (TypeError, ValueError, OverflowError, ProtocolError) as error:
            logger.exception("the result of workload %s cannot be sent", name)
            self.send(Answer(number=number, error=describe(error)))

    def _carry_out(self, envelope: Envelope) -> AnyResult:
        request = envelope.request
        if isinstance(request, Ping):
            return Done()
        if isinstance(request, Shutdown):
            if self._controller is not None:
                self._controller.close()
            return Done()
        return self._the_controller().carry_out(request)

    def _the_controller(self) -> Controller:
        if self._controller is None:
            # Imports torch and deepspeed: seconds, which is why it waits until the rank has joined.
            from trial_core.controller.controller import Controller

            self._controller = Controller(
                emit=self.send,
                stop_barrier=self._stop_barrier,
                ask_to_stop=lambda: self.send(StopRequested()),
            )
        return self._controller


def describe(error: BaseException) -> RankError:
    """An exception as plain data; its traceback starts where the user's code does."""
    frames = traceback.extract_tb(error.__traceback__)
    own = str(Path(__file__).resolve().parents[1])
    first_foreign = next((i for i, f in enumerate(frames) if not f.filename.startswith(own)), 0)
    report = traceback.TracebackException.from_exception(error)
    report.stack = traceback.StackSummary.from_list(frames[first_foreign:])
    return RankError(
        error_type=type(error).__name__,
        is_ours=isinstance(error, TrialflowError),
        message=_sendable(str(error)),
        traceback=_sendable("".join(report.format())),
    )


def _sendable(text: str) -> str:
    """`text` without what UTF-8 has no bytes for (lone surrogates, of undecodable file names)."""
    return text.encode("utf-8", "replace").decode()


def end_now(reason: str) -> None:
    """End this rank, and every process it has started, at once."""
    logger.error("rank ends: %s", reason)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def leave_signals_to_the_driver() -> None:
    """Survive what a machine that shuts down sends to every process of a service: the driver hears
    of it too, has this rank save, and then ends it. Processes that a rank starts are as ever."""

    def survive(number: int, frame: FrameType | None) -> None:
        """Not SIG_IGN, which programs that this rank starts would inherit."""

    before = {each: signal.signal(each, survive) for each in (signal.SIGTERM, signal.SIGINT)}

    def in_child() -> None:
        for each, handler in before.items():
            signal.signal(each, handler)

    os.register_at_fork(after_in_child=in_child)


def main() -> None:
    """Join the driver and serve it."""
    rank = int(os.environ["RANK"])
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s [rank {rank}] %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    dump_stacks_when_asked()
    leave_signals_to_the_driver()
    secret = bytes.fromhex(os.environ.pop("TRIALFLOW_CHANNEL_SECRET"))
    hello = Hello(rank=rank, pid=os.getpid(), host=socket.gethostname())
    try:
        connection = RankConnection(os.environ["TRIALFLOW_CHANNEL"], secret, hello)
    except SlotsError as error:
        sys.exit(f"trialflow worker, rank {rank}: {error}")
    # A child that this rank forks must not keep the connection open when the rank is gone.
    os.register_at_fork(after_in_child=connection.close)
    worker = Worker(connection)
    log = os.environ.get("TRIALFLOW_LOG")
    pump = LogPump(Path(log), rank, worker.send) if log else None
    worker.run()
    if pump is not None:
        pump.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # Libraries leave threads and atexit hooks behind that can hang an interpreter's end; all that
    # matters has been closed by the controller.
    os._exit(0)


if __name__ == "__main__":
    main()
