"""Failures that are shared by all ranks, and uploads beside training."""

from __future__ import annotations

import threading
from typing import Any, NoReturn

import pytest

from trial_core.controller.collective_errors import Outcome, on_every_rank, on_the_first_rank
from trial_core.distributed import DistributedContext
from trial_core.errors import CheckpointDamaged, StorageError, TrialflowError
from trial_core.trainer import background_upload
from trial_core.trainer.background_upload import TRIES, BackgroundUpload, persistently


class Rank(DistributedContext):
    """One of two ranks, which is told what the other says."""

    def __init__(self, rank: int, other: Outcome) -> None:
        super().__init__(
            rank=rank, size=2, local_rank=rank, local_size=2, cross_rank=0, cross_size=1
        )
        self._other = other

    def allgather(self, stuff: Any) -> list[Any]:
        return [stuff, self._other] if self.rank == 0 else [self._other, stuff]

    def broadcast(self, stuff: Any) -> Any:
        return stuff if self.rank == 0 else self._other


def fails() -> NoReturn:
    raise StorageError("the disk is full")


def test_a_rank_that_fails_takes_the_others_along() -> None:
    """The rank that did well raises the other's error, and says whose it is."""
    other = Outcome(None, "CheckpointDamaged", "model.pt has 3 bytes, expected 4")
    with pytest.raises(CheckpointDamaged, match=r"^rank 1: model.pt has 3 bytes, expected 4$"):
        on_every_rank(Rank(0, other), lambda: "well")


def test_the_failed_rank_raises_what_the_others_do() -> None:
    """All ranks end with one and the same message."""
    with pytest.raises(StorageError, match=r"^rank 0: the disk is full$"):
        on_every_rank(Rank(0, Outcome("well")), fails)


def test_everybodys_results_where_all_went_well() -> None:
    """In the order of ranks."""
    assert on_every_rank(Rank(1, Outcome("first")), lambda: "second") == ["first", "second"]


def test_what_the_first_rank_does_is_not_done_elsewhere() -> None:
    """The others get its result, or its error."""
    assert on_the_first_rank(Rank(1, Outcome("read once")), fails) == "read once"
    with pytest.raises(StorageError, match=r"^gone$"):
        on_the_first_rank(Rank(1, Outcome(None, "StorageError", "gone")), fails)


def test_an_error_that_takes_more_than_a_message_is_still_told() -> None:
    """Its kind becomes part of the message."""
    with pytest.raises(TrialflowError, match=r"^RankFailed: rank 1: broke$"):
        on_every_rank(Rank(0, Outcome(None, "RankFailed", "broke")), lambda: None)


def test_an_upload_runs_beside_and_tells_when_it_has_ended() -> None:
    """Not before its work is done, and then how."""
    may_end = threading.Event()

    def work() -> Outcome:
        may_end.wait(30)
        return Outcome("stored")

    running = BackgroundUpload(work)
    assert running.outcome() is None
    may_end.set()
    assert running.outcome(within_seconds=30) == Outcome("stored")


def test_a_storage_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few times, with pauses; then its error is raised."""
    monkeypatch.setattr(background_upload, "PAUSE_SECONDS", 0.0)
    tries: list[int] = []

    def persist() -> NoReturn:
        tries.append(1)
        fails()

    with pytest.raises(StorageError, match="the disk is full"):
        persistently(persist)
    assert len(tries) == TRIES
    remaining = iter([fails, lambda: "stored"])
    assert persistently(lambda: next(remaining)()) == "stored"


def test_a_mistake_in_an_upload_is_not_lost() -> None:
    """Whatever ends the thread is raised in the main one."""

    def work() -> NoReturn:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        BackgroundUpload(work).outcome(within_seconds=30)
