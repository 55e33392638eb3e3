"""Waiting for a condition of a server or another process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

import trialflow.flows.lifecycle.stop_monitor
from tests.support.prefect import PrefectServer
from trial_core.processes.slots.stop_barrier import Position, StopCoordinator

WAIT_SECONDS = 300.0
"""Only a wait that never ends is a failure: machines may be very slow."""


def until(
    is_so: Callable[[], Any],
    what: str,
    timeout_seconds: float = WAIT_SECONDS,
    instead: Callable[[], Any] = lambda: "",
) -> Any:
    """Wait until `is_so` returns a true value, and return it.

    Args:
        what: the awaited condition, for the failure's message.
        instead: what was seen instead, for the failure's message.
    """
    deadline = time.monotonic() + timeout_seconds
    while not (found := is_so()):
        assert time.monotonic() < deadline, f"timeout: {what}; instead: {instead()}"
        time.sleep(0.1)
    return found


def ask(server: PrefectServer, path: str, body: dict[str, Any] | None = None) -> Any:
    """The server's answer to a query."""
    return retry_while_busy(lambda: server.query(path, body))


def retry_while_busy(call: Callable[[], Any]) -> Any:
    """Repeat `call` while the server answers 503: SQLite may be locked on a busy machine."""

    def answered() -> list[Any]:
        try:
            return [call()]
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                raise
            return []

    return until(answered, "an answer of the server")[0]


def stops_reach_ranks(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """A semaphore that is released whenever a stop has reached a rank of this process's runs.

    The rank then begins no further batch, even if the one that it is in ends at once.
    """
    rank_paused, reached = StopCoordinator.rank_paused, threading.Semaphore(0)

    def note(self: StopCoordinator, rank: int, at: Position) -> None:
        rank_paused(self, rank, at)
        reached.release()

    monkeypatch.setattr(StopCoordinator, "rank_paused", note)
    monkeypatch.setattr(trialflow.flows.lifecycle.stop_monitor, "POLL_SECONDS", 0.1)
    return reached
