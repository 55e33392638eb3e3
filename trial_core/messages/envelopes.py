"""The handshake, the envelopes of requests and results, the events, and their encoding."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

import msgspec

from trial_core import errors
from trial_core.errors import RankFailed, SlotsError, Stalled, TrialflowError
from trial_core.messages.requests import AnyRequest, AnyResult, Length, Message, RestoredSettings
from trial_core.schedule.sequencer import CheckpointPolicy
from trial_core.schedule.stop_requests import StopReason
from trial_core.schedule.work import Work

MetricsKind = Literal["training", "validation"]


class Invitation(Message):
    """The data by which a rank joins a driver that has not started it."""

    path: str  # the channel's Unix socket, for ranks on the driver's machine
    # For ranks on other machines, ``tls://HOST:PORT,…``; None if they cannot join.
    address: str | None
    secret: bytes
    log_dir: str  # the folder where ranks on the driver's machine write their threads' stacks


class Hello(Message):
    """A rank's first message, after both ends have proved that they know the secret.
    `is_interactive`: a person uses its process, for example in a notebook."""

    rank: int
    pid: int
    host: str
    is_interactive: bool = False


class Envelope(Message):
    """A request, and the number that its answer will repeat."""

    number: int
    request: AnyRequest


class RankError(Message):
    """An exception that a workload raised on a rank."""

    error_type: str  # the name of its class
    is_ours: bool  # True if it is a `TrialflowError`; a user's class may have the same name
    message: str
    traceback: str
    batches_trained: int | None = None  # None before the trial was built


class Answer(Message):
    """A rank's reply to request `number`: a result or an error."""

    number: int
    result: AnyResult | None = None
    error: RankError | None = None


class BatchesTrained(Message):
    """Rank 0's progress in training; sent at most a few times a second."""

    batches: int
    total: int = 0  # batches when training ends, if a script decides that; 0 if it does not


class BatchesValidated(Message):
    """Rank 0's progress in a validation; sent at most a few times a second."""

    batches: int


class PauseSteps(Message):
    """Begin no further step, and report your position; see `processes.slots.stop_barrier`."""


class StepsPaused(Message):
    """A rank's reply to `PauseSteps`: the workloads it has begun, and the steps of the last one."""

    workload: int
    steps: int


class ResumeUntil(Message):
    """All ranks are paused: continue to this step of this workload, and end there. If `is_break`,
    only a train-workload ends there, and others follow."""

    workload: int
    steps: int
    is_break: bool = False


class StopRequested(Message):
    """This rank was asked to stop. The reason is a signal's; None if the trial asks: then the rank
    begins no batch before all ranks have agreed on the last one."""

    reason: StopReason | None = None
    detail: str = ""


class Abort(Message):
    """End your part of the run with this error, whose class may have other attributes: `details`.
    Sent to ranks that the driver has not started."""

    error_type: str
    message: str
    details: dict[str, Any] = msgspec.field(default_factory=dict)

    @classmethod
    def of(cls, error: BaseException) -> Abort:
        name, details = type(error).__name__, {}
        if isinstance(error, RankFailed):
            details = asdict(error)
        elif isinstance(error, Stalled):
            details = {"stacks": list(error.stacks)}
        return cls(error_type=name, message=str(error), details=details)

    @property
    def error(self) -> TrialflowError:
        known = getattr(errors, self.error_type, None)
        if isinstance(known, type) and issubclass(known, TrialflowError):
            arguments = () if known is RankFailed else (self.message,)
            with suppress(TypeError):
                return known(*arguments, **self.details)
        return SlotsError(f"the driver has failed: {self.error_type}: {self.message}")


class DumpStacks(Message):
    """Reply with the stacks of your threads."""


class StacksDumped(Message):
    """A rank's reply to `DumpStacks`."""

    text: str


class BytesWritten(Message):
    """The bytes that a rank that the driver has not started has written to disks and its log.

    Sent every few seconds, if it has grown."""

    count: int


class Logged(Message):
    """A line of the driver's log, for ranks that have joined: rank 0 logs it."""

    level: int
    text: str


class Activity(Message):
    """What rank 0 is doing in a stage that takes long, for people."""

    text: str


class LogLines(Message):
    lines: list[str]


class MetricsReported(Message):
    """Metrics that a Core API script has reported on a rank."""

    kind: MetricsKind
    steps_completed: int
    metrics: dict[str, Any]
    group: str = ""  # the script's own, to which training metrics belong; empty without one
    rank: int = 0
    receipt: str = ""  # the id of the `ReportTaken` that it waits for; empty if it does not wait
    # Since its last report, validation or checkpoint, and their duration. Both are 0 unless these
    # are training metrics of a script that states its work.
    steps: int = 0
    seconds: float = 0.0
    work: Work = Work()  # of a step, on all ranks
    device: str = ""  # the accelerator's name; empty for the CPU

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.group or self.kind} metrics at {self.steps_completed}"


class ReportTaken(Message):
    """The driver has received a report: all that a rank sends from now on comes after it. Sent to
    all ranks; one waits for it."""

    receipt: str


class CheckpointWritten(Message):
    """A Core API script has written a checkpoint to its ranks' staging folders.

    It waits until the driver has committed it, and then released the folders. If not `waits`, it
    does so before its next checkpoint."""

    uuid: str
    steps_completed: int
    waits: bool = True


class FitBegun(Message):
    """A script has called `Trainer.fit` on rank 0, with these arguments.

    Its ranks carry out requests for a trial, from `AttachTrial` to `EndFit`.
    """

    max_length: Length | None
    reporting_period: Length
    validation_period: Length | None
    checkpoint_period: Length | None
    checkpoint_policy: CheckpointPolicy | None
    step_zero_validation: bool
    keep: list[str] = msgspec.field(default_factory=list)


class SettingsRestored(Message):
    """A library in a Core API script has restored a checkpoint, and says which settings count."""

    settings: RestoredSettings


ScriptEvent = MetricsReported | CheckpointWritten | FitBegun | SettingsRestored
"""A script's events. All but reports of metrics are from rank 0."""

FromRank = (
    Answer
    | BatchesTrained
    | BatchesValidated
    | StepsPaused
    | StopRequested
    | LogLines
    | Activity
    | ScriptEvent
    | StacksDumped
    | BytesWritten
)
FromDriver = Envelope | PauseSteps | ResumeUntil | Abort | DumpStacks | Logged | ReportTaken


@dataclass(frozen=True)
class Peer:
    """A rank that has joined the channel, by its `Hello`. `is_here`: `pid` is its process on this
    machine."""

    rank: int
    pid: int
    host: str
    is_here: bool = False
    is_interactive: bool = False


encode: Callable[[Message], bytes] = msgspec.msgpack.Encoder().encode


def decoding(kind: Any) -> Callable[[bytes], Any]:
    """A function that decodes messages of a type, or raises msgspec.DecodeError."""
    decoder = msgspec.msgpack.Decoder(kind)

    def decode(data: bytes) -> Any:
        try:
            return decoder.decode(data)
        except (UnicodeDecodeError, RecursionError, TypeError) as error:
            raise msgspec.DecodeError(str(error)) from error

    return decode


decode_from_rank: Callable[[bytes], FromRank] = decoding(FromRank)
decode_from_driver: Callable[[bytes], FromDriver] = decoding(FromDriver)
decode_hello: Callable[[bytes], Hello] = decoding(Hello)
decode_invitation: Callable[[bytes], Invitation | Abort | Logged] = decoding(
    Invitation | Abort | Logged
)


def check_integer(value: int, place: str) -> None:
    """Refuse a metric that messages cannot hold: MessagePack's integers have 64 bits. TrialError if
    `value` is below -2**63, or not below 2**64."""
    if not -(2**63) <= value < 2**64:
        raise errors.TrialError(
            f"{place} is or holds an integer of {value.bit_length()} bits, expected one from "
            "-2**63 to 2**64 - 1; report it as a float, or in a larger unit"
        )
