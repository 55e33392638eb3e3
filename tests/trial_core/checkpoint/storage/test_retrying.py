"""Repeated work with a storage that fails."""

from __future__ import annotations

from typing import NoReturn

import pytest

from trial_core.checkpoint.storage import retrying
from trial_core.checkpoint.storage.retrying import TRIES, retry_storage
from trial_core.errors import StorageError


def fails() -> NoReturn:
    raise StorageError("the disk is full")


def test_a_storage_failure_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few times, with pauses; then the error is raised."""
    monkeypatch.setattr(retrying, "PAUSE_SECONDS", 0.0)
    tries: list[int] = []

    def persist() -> NoReturn:
        tries.append(1)
        fails()

    with pytest.raises(StorageError, match="the disk is full"):
        retry_storage(persist)
    assert len(tries) == TRIES
    remaining = iter([fails, lambda: "stored"])
    assert retry_storage(lambda: next(remaining)()) == "stored"
