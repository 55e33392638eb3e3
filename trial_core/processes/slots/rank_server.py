"""Serves a driver's requests on a rank: two lanes, and errors as plain data.

The compute lane is the caller's thread, usually the main thread: one workload at a time,
collectives allowed. A background thread is the I/O lane: no collectives. Another thread receives.

`rank_main` uses it for a rank that a driver has started, `joined_rank` for one that has joined.
"""

from __future__ import annotations

import importlib
import logging
import queue
import re
import runpy
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from trial_core.errors import SlotsError, TrialflowError
from trial_core.messages import (
    Abort,
    Answer,
    AnyRequest,
    AnyResult,
    Done,
    DumpStacks,
    Envelope,
    FromDriver,
    Logged,
    Message,
    PauseSteps,
    Ping,
    RankError,
    ReportTaken,
    ResumeUntil,
    Shutdown,
    StacksDumped,
    StepsPaused,
    TrainBatches,
    decode_from_driver,
)
from trial_core.processes.slots.connection import RankConnection
from trial_core.processes.slots.framing import ProtocolError
from trial_core.processes.slots.receipts import Receipts
from trial_core.processes.slots.stacks import current_stacks
from trial_core.processes.slots.stop_barrier import Position, StopBarrier

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 1.0

RUNPY = (runpy.__file__, "<frozen runpy>")
"""The files of the frames through which a Core API script is run."""
IMPORTLIB = ("<frozen importlib", importlib.__file__)
ADVICE = {
    "Torch not compiled with CUDA enabled|Found no NVIDIA driver on your system|No CUDA GPUs are": (
        "This rank has no GPU, and the code asks for one: leave the device to a trial's context "
        "(wrap_model, to_device, context.device); if there should be one, `trialflow doctor` "
        "says what is missing"
    ),
    "same dtype, but got:? .*(BFloat16|Half)|type .*(BFloat16|Half).* should be the same": (
        "A model with bf16 or fp16 weights computes in that type alone: cast its floating-point "
        "inputs, as by inputs.to(torch.bfloat16), or have torch do it with torch_autocast in "
        "DeepSpeed's configuration, or use_amp in a PyTorchTrial"
    ),
}
"""For texts in errors of torch's, what a trial has to do."""


class Workloads(Protocol):
    """Carries out a rank's requests; a controller."""

    @property
    def batches_trained(self) -> int | None:
        """None before the trial is built."""

    def carry_out(self, request: AnyRequest) -> AnyResult:
        """Carry out one request, in the thread of its lane."""

    def close(self) -> None:
        """Release everything, at the end of the run."""


class RankServer:
    """Receives requests, and answers them.

    Args:
        on_end: called with the error when the driver is gone or has aborted the run: in any thread,
            perhaps several times. Must return at once.
        on_log: called with the lines of the driver's log.
        logs_errors: True to log the errors of workloads; False if the caller raises them.
    """

    def __init__(
        self,
        connection: RankConnection,
        on_end: Callable[[TrialflowError], None],
        logs_errors: bool = True,
        on_log: Callable[[int, str], None] = lambda level, text: None,
    ) -> None:
        self._connection = connection
        self._on_end = on_end
        self._on_log = on_log
        self._logs_errors = logs_errors
        self._compute: queue.SimpleQueue[Envelope | None] = queue.SimpleQueue()
        self._io: queue.SimpleQueue[Envelope | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (("channel", self._receive), ("io-lane", self._serve_io))
        ]
        self.stop_barrier = StopBarrier()
        self.receipts = Receipts()
        self.raised: BaseException | None = None
        """The last exception of a workload."""

    def start(self, workloads: Workloads) -> None:
        """Receive requests from now on, and serve those of the I/O lane."""
        self._workloads = workloads
        for thread in self._threads:
            thread.start()

    def next_request(self) -> Envelope | None:
        """Wait for the compute lane's next request; None if `end` was called."""
        return self._compute.get()

    def end(self) -> None:
        """Have `next_request` return None, and serve no further request of the I/O lane."""
        self._compute.put(None)
        self._io.put(None)

    def send(self, message: Message) -> None:
        """Send to the driver, in any thread."""
        try:
            self._connection.send(message)
        except OSError:
            self._on_end(SlotsError("the driver is gone"))

    def answer(self, envelope: Envelope) -> BaseException | None:
        """Carry out a request and answer it. Return the workload's exception, or None."""
        number, name = envelope.number, envelope.request.title
        raised: BaseException | None = None
        try:
            answer = Answer(number=number, result=self._carry_out(envelope.request))
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - reported to the driver
            self._log(f"{name} failed")
            raised = self.raised = error
            answer = Answer(
                number=number, error=to_rank_error(error, self._workloads.batches_trained)
            )
        try:
            self.send(answer)
        except (TypeError, ValueError, OverflowError, ProtocolError) as error:
            self._log(f"cannot send the result of {name}")
            raised = self.raised = error
            self.send(Answer(number=number, error=to_rank_error(error)))
        return raised

    def close(self) -> None:
        """End the connection, without waiting for workloads of the I/O lane that still run."""
        self.end()
        with suppress(OSError):  # the driver has ended it
            self._connection.shutdown()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(CLOSE_SECONDS)
        self._connection.close()

    def _log(self, what: str) -> None:
        if self._logs_errors:
            logger.exception(what)

    def _receive(self) -> None:
        try:
            while True:
                self._dispatch(decode_from_driver(self._connection.receive()))
        except (EOFError, OSError):
            self._on_end(SlotsError("the driver is gone"))
        except (msgspec.MsgspecError, ProtocolError) as error:
            self._on_end(SlotsError(f"the driver sent an invalid message: {error}"))

    def _dispatch(self, message: FromDriver) -> None:
        if isinstance(message, PauseSteps):
            at = self.stop_barrier.pause()
            self.send(StepsPaused(workload=at.workload, steps=at.steps))
        elif isinstance(message, ResumeUntil):
            end = Position(message.workload, message.steps)
            self.stop_barrier.resume_until(end, message.is_break)
        elif isinstance(message, Abort):
            self._on_end(message.error)
        elif isinstance(message, Logged):
            self._on_log(message.level, message.text)
        elif isinstance(message, ReportTaken):
            self.receipts.note(message.receipt)
        elif isinstance(message, DumpStacks):
            self.send(StacksDumped(text=current_stacks()))
        else:
            if isinstance(message.request, TrainBatches):
                self.stop_barrier.expect_workload()
            lane = self._io if message.request.lane == "io" else self._compute
            lane.put(message)

    def _serve_io(self) -> None:
        while (envelope := self._io.get()) is not None:
            self.answer(envelope)

    def _carry_out(self, request: AnyRequest) -> AnyResult:
        if isinstance(request, Ping):
            return Done()
        if isinstance(request, Shutdown):
            self._workloads.close()
            return Done()
        return self._workloads.carry_out(request)


def to_rank_error(error: BaseException, batches_trained: int | None = None) -> RankError:
    """Turn an exception into plain data; its traceback begins with the user's code."""
    found = traceback.extract_tb(error.__traceback__)
    frames = [each for each in found if not each.filename.startswith(IMPORTLIB)]
    library = str(Path(__file__).resolve().parents[2])
    first_user_frame = next(
        (i for i, f in enumerate(frames) if not f.filename.startswith((library, *RUNPY))), 0
    )
    report = traceback.TracebackException.from_exception(error)
    report.stack = traceback.StackSummary.from_list(frames[first_user_frame:])
    return RankError(
        error_type=type(error).__name__,
        is_ours=isinstance(error, TrialflowError),
        message=_encodable(str(error) or "without a message") + _advice(str(error)),
        traceback=_encodable("".join(report.format())),
        batches_trained=batches_trained,
    )


def _advice(message: str) -> str:
    return next((f". {each}" for text, each in ADVICE.items() if re.search(text, message)), "")


def _encodable(text: str) -> str:
    """`text` without lone surrogates (of undecodable file names), which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()
