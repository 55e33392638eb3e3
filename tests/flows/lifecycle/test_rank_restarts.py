"""Which failures of ranks are worth a restart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trial_core.errors import RankFailed, Stalled, TopologyMismatch
from trialflow.flows.lifecycle.rank_restarts import Refusals, Restarts


def killed() -> RankFailed:
    return RankFailed(rank=1, host="here", during="train-workload", signal_name="SIGKILL")


def raised(
    message: str = "out of luck",
    error_type: str = "RuntimeError",
    at: int | None = None,
    rank: int = 1,
) -> RankFailed:
    return RankFailed(
        rank=rank, host="here", during="train-workload", error_type=error_type,
        error_message=message, batches_trained=at,
    )  # fmt: skip


def a_run(batches_trained: int) -> Any:
    return SimpleNamespace(batches_trained=batches_trained, has_trained=batches_trained > 0)


@pytest.mark.parametrize("max_restarts", [0, 1, 3])
def test_at_most_max_restarts_are_granted(max_restarts: int) -> None:
    """The failure after the last restart ends the run."""
    restarts = Restarts(max_restarts)
    granted = [restarts.grant(killed(), a_run(5)) for _ in range(max_restarts + 2)]
    assert granted == [True] * max_restarts + [False] * 2


def test_an_exception_before_training_is_not_retried() -> None:
    """It would be raised again, so no restart is spent on it; a killed rank gets one."""
    restarts = Restarts(5)
    assert not restarts.grant(raised(), a_run(0))
    assert restarts.count == 0
    assert restarts.grant(killed(), a_run(0))


@pytest.mark.parametrize(
    ("again", "is_granted"),
    [
        (lambda: (raised(), 8), False),
        (lambda: (raised(rank=0), 8), False),
        (lambda: (raised(), 9), True),
        (lambda: (raised("12.3 MiB are free, process 77 has the rest"), 8), False),
        (lambda: (raised(error_type="KeyError"), 8), True),
        (lambda: (killed(), 8), True),
    ],
    ids=["same", "on another rank", "at another batch", "another text", "another type", "killed"],
)
def test_a_repeated_exception_is_not_retried(again: Any, is_granted: bool) -> None:
    """The same type of exception at the same batch after a restart ends the run."""
    restarts = Restarts(5)
    assert restarts.grant(raised(), a_run(8))
    failure, batches_trained = again()
    assert restarts.grant(failure, a_run(batches_trained)) == is_granted


def test_the_batches_of_an_unfinished_workload_count() -> None:
    """A workload may be long. A restart helps after its first batch, and again at another batch."""
    restarts, begun_at_0 = Restarts(5), a_run(0)
    assert not restarts.grant(raised(at=0), begun_at_0)
    assert restarts.grant(raised(at=700), begun_at_0)
    assert restarts.grant(raised(at=800), begun_at_0)
    assert not restarts.grant(raised(at=800), begun_at_0)


def test_the_pause_before_a_restart_grows() -> None:
    """From none to one minute."""
    restarts, pauses = Restarts(8), []
    for _ in range(8):
        assert restarts.grant(Stalled("no batch has ended"), a_run(8))
        pauses.append(restarts.pause_seconds)
    assert pauses == [0, 2, 4, 8, 16, 32, 60, 60]
    assert not restarts.grant(Stalled("no batch has ended"), a_run(8))


def a_launch(slots: int, max_slots: int = 32, stop_request: Any = None) -> Any:
    """A run whose trial is built on so many slots."""
    return SimpleNamespace(
        slots=SimpleNamespace(world_size=slots),
        config=SimpleNamespace(resources=SimpleNamespace(max_slots=max_slots)),
        stopping=SimpleNamespace(request=stop_request),
    )


def refused(message: str, during: str = "build-trial") -> RankFailed:
    return RankFailed(
        rank=0, host="here", during=during, error_type="TrialError", error_message=message
    )


def test_fewer_ranks_are_tried_if_the_trial_refuses_their_number() -> None:
    """While it is built, or because a checkpoint cannot be restored. Not for the largest number."""
    assert Refusals().grant(refused("24 does not divide 64"), a_launch(24))
    assert Refusals().grant(TopologyMismatch("saved by 2 stages"), a_launch(24))
    assert not Refusals().grant(refused("no such file"), a_launch(32))
    assert not Refusals().grant(refused("a bad batch", during="train-workload"), a_launch(24))
    assert not Refusals().grant(killed(), a_launch(24))
    assert not Refusals().grant(refused("24"), a_launch(24, stop_request="cancelled"))


def test_the_same_text_for_several_numbers_is_a_mistake() -> None:
    """Which fewer ranks do not mend."""
    refusals = Refusals()
    assert refusals.grant(refused("no such file"), a_launch(24))
    assert refusals.grant(refused("no such file"), a_launch(16))
    assert not refusals.grant(refused("no such file"), a_launch(8))
