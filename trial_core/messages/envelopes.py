"""The handshake, the envelopes of requests and results, the events, and their encoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from trial_core.messages.requests import AnyRequest, AnyResult, Message
from trial_core.run.observer import MetricsKind


class Hello(Message):
    """A rank's first message, after both ends have proved that they know the secret."""

    rank: int
    pid: int
    host: str


class Envelope(Message):
    """A request, and the number that its answer will have."""

    number: int
    request: AnyRequest


class RankError(Message):
    """An exception that a workload raised on a rank.

    Attributes:
        error_type: the name of its class.
        is_ours: whether it is a `TrialflowError`; a user's class may have the same name.
        message, traceback: of the exception, as text.
        batches_trained: how many batches the rank had trained; None before the trial was built.
    """

    error_type: str
    is_ours: bool
    message: str
    traceback: str
    batches_trained: int | None = None


class Answer(Message):
    """A rank's reply to request `number`: a result or an error."""

    number: int
    result: AnyResult | None = None
    error: RankError | None = None


class BatchesTrained(Message):
    """Rank 0's progress in training; sent at most a few times a second."""

    batches: int


class BatchesValidated(Message):
    """Rank 0's progress in a validation; sent at most a few times a second."""

    batches: int


class PauseSteps(Message):
    """Begin no further step, and report your position; see `trial_core.slots.stop_barrier`."""


class StepsPaused(Message):
    """A rank's reply to `PauseSteps`: the workloads it has begun, and the steps of the last one."""

    workload: int
    steps: int


class ResumeUntil(Message):
    """All ranks are paused: continue to this step of this workload, and end there."""

    workload: int
    steps: int


class StopRequested(Message):
    """The trial on this rank has requested a stop. The rank begins no batch before all have agreed
    on the last one."""


class Activity(Message):
    """What rank 0 is doing in a stage that takes long, for people."""

    text: str


class LogLines(Message):
    """New lines of a rank's log."""

    lines: list[str]


class MetricsReported(Message):
    """Metrics that a Core API script has reported on rank 0."""

    kind: MetricsKind
    steps_completed: int
    metrics: dict[str, Any]


class CheckpointWritten(Message):
    """A Core API script has written a checkpoint to its ranks' staging folders. It waits until the
    driver has committed it, and then released the folders."""

    uuid: str
    steps_completed: int


ScriptEvent = MetricsReported | CheckpointWritten
"""What a Core API script tells the driver, from rank 0."""

FromRank = (
    Answer
    | BatchesTrained
    | BatchesValidated
    | StepsPaused
    | StopRequested
    | LogLines
    | Activity
    | ScriptEvent
)
FromDriver = Envelope | PauseSteps | ResumeUntil


@dataclass(frozen=True)
class Peer:
    """A rank that has joined the channel."""

    rank: int
    pid: int
    host: str


Decoded = TypeVar("Decoded")

_encoder = msgspec.msgpack.Encoder()
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
_from_driver: msgspec.msgpack.Decoder[FromDriver] = msgspec.msgpack.Decoder(FromDriver)
_hello = msgspec.msgpack.Decoder(Hello)


def encode(message: Message) -> bytes:
    """The bytes of a message."""
    return _encoder.encode(message)


def decode_from_rank(data: bytes) -> FromRank:
    """A message from a rank. Raises msgspec.DecodeError if it is invalid."""
    return _decode(_from_rank, data)


def decode_from_driver(data: bytes) -> FromDriver:
    """A message from the driver. Raises msgspec.DecodeError if it is invalid."""
    return _decode(_from_driver, data)


def decode_hello(data: bytes) -> Hello:
    """A rank's first message. Raises msgspec.DecodeError if it is invalid."""
    return _decode(_hello, data)


def _decode(decoder: msgspec.msgpack.Decoder[Decoded], data: bytes) -> Decoded:
    try:
        return decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error
