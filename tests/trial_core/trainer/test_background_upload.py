"""Uploads in a thread, and their retries."""

from __future__ import annotations

import threading
from typing import NoReturn

import pytest

from trial_core.controller.collective_errors import Outcome
from trial_core.errors import StorageError
from trial_core.trainer import background_upload
from trial_core.trainer.background_upload import TRIES, BackgroundUpload, retry_storage


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
