"""Any bytes are a message or raise msgspec.DecodeError; a message survives its encoding."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st

from tests.support.manifests import entry
from tests.support.strategies import changed, fuzz, spoilt
from trial_core.checkpoint.manifest import Topology
from trial_core.messages import (
    Abort,
    Activity,
    Answer,
    BatchesTrained,
    BytesWritten,
    CheckpointWritten,
    Done,
    DumpStacks,
    Envelope,
    FetchCheckpoint,
    Hello,
    LogLines,
    MetricsReported,
    RankError,
    ReportTaken,
    ResumeUntil,
    StacksDumped,
    StepsPaused,
    StopRequested,
    Trained,
    TrialBuilt,
    decode_from_driver,
    decode_from_rank,
    decode_hello,
    encode,
)

TOPOLOGY = Topology(world_size=2, data_parallel_size=2)
TRAINED = Trained(
    batches_trained=7,
    metrics={"loss": 0.25, "table": [[1, "a"]]},
    seconds=1.5,
    stop_requested=False,
)
MESSAGES = [
    Hello(rank=1, pid=7, host="here"),
    Answer(number=7, result=Done()),
    Answer(number=7, result=TRAINED),
    Answer(
        number=7, result=TrialBuilt(hooks=["a"], topology=TOPOLOGY, batch_samples=8, versions={})
    ),
    Answer(
        number=7, error=RankError(error_type="E", is_ours=True, message="é", traceback="File …")
    ),
    BatchesTrained(batches=7),
    LogLines(lines=["one", "two"]),
    Activity(text="compiling, for 15 s"),
    MetricsReported(kind="training", steps_completed=7, metrics={"loss": [0.25, None]}),
    CheckpointWritten(uuid="u", steps_completed=7),
    ReportTaken(receipt="0a"),
    StepsPaused(workload=1, steps=2),
    ResumeUntil(workload=1, steps=2),
    StopRequested(reason="preempted", detail="SIGTERM"),
    Abort(error_type="RankFailed", message="m", details={"rank": 1}),
    DumpStacks(),
    StacksDumped(text="Thread 0x1"),
    BytesWritten(count=2**40),
    Envelope(
        number=7,
        request=FetchCheckpoint(uuid="u", files=[entry("a/b", b"x")], saved_by=TOPOLOGY),
    ),
]
DECODERS = (decode_from_rank, decode_from_driver, decode_hello)
TRAINED_BYTES = encode(Answer(number=7, result=TRAINED))


def packable(value: Any) -> Any:
    """Plain data without what MessagePack cannot represent."""
    if isinstance(value, dict):
        return {packable(key): packable(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [packable(inner) for inner in value]
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, int):
        return max(-(2**63), min(value, 2**64 - 1))
    return value


def packed(message: msgspec.Struct) -> st.SearchStrategy[bytes]:
    """The bytes of a message, changed in its fields, in its bytes, or not at all."""
    plain = msgspec.to_builtins(message)
    return changed(plain).map(packable).map(msgspec.msgpack.encode).flatmap(spoilt)


@fuzz(80, data=st.sampled_from(MESSAGES).flatmap(packed) | st.binary(max_size=40))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    """A message that is read is the same after another journey."""
    for decode in DECODERS:
        try:
            message = decode(data)
        except msgspec.DecodeError:
            continue
        assert encode(decode(encode(message))) == encode(message)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives(message: Any) -> None:
    """For one of the three receivers."""
    read = []
    for decode in DECODERS:
        try:
            read.append(decode(encode(message)))
        except msgspec.ValidationError:
            continue
    assert read == [message]


@pytest.mark.parametrize(
    "value",
    [b"\xa2\xff\xfe", b"\x91" * 100_000 + b"\x00", b"\xdf\xff\xff\xff\xff", b"\x81\x80\x00"],
    ids=["no UTF-8", "deep", "claims 4 G entries", "a mapping as key"],
)
def test_a_value_that_python_cannot_hold_is_refused(value: bytes) -> None:
    """With the error that the receivers of messages expect."""
    table = msgspec.msgpack.encode([[1, "a"]])
    assert TRAINED_BYTES.count(table) == 1
    with pytest.raises(msgspec.DecodeError):
        decode_from_rank(TRAINED_BYTES.replace(table, value))
    with pytest.raises(msgspec.DecodeError):
        decode_hello(encode(Hello(rank=0, pid=1, host="here")).replace(b"\xa4here", value))
