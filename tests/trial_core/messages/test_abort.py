"""An error of the driver's as a message, and as an error again on a rank."""

from __future__ import annotations

import pytest

from trial_core.errors import (
    CheckpointError,
    LaunchError,
    RankFailed,
    SlotsError,
    Stalled,
    TrialflowError,
)
from trial_core.messages import Abort, decode_from_driver, encode

RANK_FAILED = RankFailed(
    rank=3, host="gpu-7", during="validate", error_type="KeyError", error_message="'x'",
    rank_traceback="Traceback …", batches_trained=7,
)  # fmt: skip


@pytest.mark.parametrize(
    "error",
    [RANK_FAILED, Stalled("hung", ["a", "b"]), LaunchError("no"), CheckpointError("disk full")],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_the_same_on_the_rank(error: TrialflowError) -> None:
    """With its message and its report."""
    message = decode_from_driver(encode(Abort.of(error)))
    assert isinstance(message, Abort)
    assert type(message.error) is type(error)
    assert str(message.error) == str(error)
    if isinstance(error, SlotsError) and isinstance(message.error, SlotsError):
        assert message.error.report() == error.report()


@pytest.mark.parametrize(
    "message",
    [
        Abort.of(KeyError("x")),
        Abort(error_type="RankFailed", message="m", details={"other": 1}),
        Abort(error_type="inspect", message="m"),
    ],
)
def test_another_error_says_that_the_driver_has_failed(message: Abort) -> None:
    """For example a mistake of ours, or a class that this version does not know."""
    assert type(message.error) is SlotsError
    assert str(message.error).startswith(f"the driver has failed: {message.error_type}: ")
