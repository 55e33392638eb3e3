"""How requests and results travel: the handshake, envelopes, events, and all of them as bytes."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from trial_core.messages.workloads import AnyRequest, AnyResult, Message


class Hello(Message):
    """A rank's first words, once both sides have proved that they know the secret."""

    rank: int
    pid: int
    host: str


class Envelope(Message):
    """A request on its way to a rank, with the number its answer will carry."""

    number: int
    request: AnyRequest


class RankError(Message):
    """An exception that a workload raised on a rank.

    Attributes:
        error_type: its class's name; a class of the user's may bear any name, also one of ours.
        is_ours: whether it is a `TrialflowError`, so that its message says all.
        message, traceback: of the exception, as text.
    """

    error_type: str
    is_ours: bool
    message: str
    traceback: str


class Answer(Message):
    """A rank's reply to the request with that number: a result, or an error."""

    number: int
    result: AnyResult | None = None
    error: RankError | None = None


class BatchesTrained(Message):
    """Rank 0 has trained this far; sent a few times a second at most."""

    batches: int


class BatchesValidated(Message):
    """Rank 0 has come this far in a validation; sent a few times a second at most."""

    batches: int


class PauseSteps(Message):
    """Begin no further step, and say how far you are; see `trial_core.slots.stop_barrier`."""


class StepsPaused(Message):
    """A rank's reply to `PauseSteps`: how many workloads it has begun, and how much of the last."""

    workload: int
    steps: int


class ResumeUntil(Message):
    """All ranks hold: go on to so many steps of that workload, and end there."""

    workload: int
    steps: int


class StopRequested(Message):
    """The trial has asked, on this rank, to save and end; the rank begins no further batch until
    all have agreed on the last one."""


class LogLines(Message):
    """New lines of a rank's output."""

    lines: list[str]


FromRank = Answer | BatchesTrained | BatchesValidated | StepsPaused | StopRequested | LogLines
FromDriver = Envelope | PauseSteps | ResumeUntil


@dataclass(frozen=True)
class Peer:
    """A rank that has joined."""

    rank: int
    pid: int
    host: str


_encoder = msgspec.msgpack.Encoder()
_from_rank = msgspec.msgpack.Decoder(FromRank)
_from_driver = msgspec.msgpack.Decoder(FromDriver)
_hello = msgspec.msgpack.Decoder(Hello)


def encode(message: Message) -> bytes:
    """A message as bytes."""
    return _encoder.encode(message)


def decode_from_rank(data: bytes) -> FromRank:
    """What a rank has sent. Raises msgspec.ValidationError when it is no such message."""
    message: FromRank = _from_rank.decode(data)
    return message


def decode_from_driver(data: bytes) -> FromDriver:
    """What the driver has sent. Raises msgspec.ValidationError when it is no such message."""
    message: FromDriver = _from_driver.decode(data)
    return message


def decode_hello(data: bytes) -> Hello:
    """A rank's first words. Raises msgspec.ValidationError when they are something else."""
    return _hello.decode(data)
