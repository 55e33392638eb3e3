"""Uploads in a thread, and their retries."""

from __future__ import annotations

import threading
from typing import Any, NoReturn

import pytest

from trial_core.controller.collective_errors import Outcome
from trial_core.distributed import DistributedContext
from trial_core.errors import StorageError
from trial_core.trainer import background_upload
from trial_core.trainer.background_upload import (
    TRIES,
    BackgroundUpload,
    retry_storage,
    run_long_on_rank_0,
)


def fails() -> NoReturn:
    raise StorageError("the disk is full")


def test_an_upload_has_an_outcome_once_it_has_ended() -> None:
    """And None while it runs."""
    may_end = threading.Event()

    def work() -> Outcome:
        may_end.wait(30)
        return Outcome("stored")

    running = BackgroundUpload(work)
    assert running.outcome() is None
    may_end.set()
    assert running.outcome(within_seconds=30) == Outcome("stored")


def test_an_unexpected_error_is_raised_in_the_main_thread() -> None:
    """It is not lost with the upload's thread."""

    def work() -> NoReturn:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        BackgroundUpload(work).outcome(within_seconds=30)


def test_a_storage_failure_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few times, with pauses; then the error is raised."""
    monkeypatch.setattr(background_upload, "PAUSE_SECONDS", 0.0)
    tries: list[int] = []

    def persist() -> NoReturn:
        tries.append(1)
        fails()

    with pytest.raises(StorageError, match="the disk is full"):
        retry_storage(persist)
    assert len(tries) == TRIES
    remaining = iter([fails, lambda: "stored"])
    assert retry_storage(lambda: next(remaining)()) == "stored"


class Rank(DistributedContext):
    """One of two ranks; `heard` is what rank 0 broadcasts, or has broadcast."""

    def __init__(self, rank: int, heard: list[Outcome | None]) -> None:
        super().__init__(
            rank=rank, size=2, local_rank=rank, local_size=2, cross_rank=0, cross_size=1
        )
        self._heard = heard

    def broadcast(self, stuff: Any) -> Any:
        if self.rank != 0:
            return self._heard.pop(0)
        self._heard.append(stuff)
        return stuff


def test_ranks_exchange_whether_long_work_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective that waited for its end would time out."""
    monkeypatch.setattr(background_upload, "POLL_SECONDS", 0.001)
    heard: list[Outcome | None] = []
    may_end = threading.Event()

    def work() -> str:
        may_end.wait(30)
        return "copied"

    def broadcast(stuff: Any) -> Any:
        heard.append(stuff)
        if len(heard) == 3:
            may_end.set()
        return stuff

    first = Rank(0, [])
    monkeypatch.setattr(first, "broadcast", broadcast)
    assert run_long_on_rank_0(first, work) == "copied"
    assert heard[:3] == [None, None, None]
    assert run_long_on_rank_0(Rank(1, heard), fails) == "copied"
    assert heard == []


def test_every_rank_raises_the_error_of_long_work() -> None:
    """Of the same class, with the same message."""
    heard: list[Outcome | None] = []
    for rank in (0, 1):
        with pytest.raises(StorageError, match="the disk is full"):
            run_long_on_rank_0(Rank(rank, heard), fails)
