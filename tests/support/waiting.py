"""Waiting for what a test expects of a server and of other processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx

from tests.support.prefect import PrefectServer

WAIT_SECONDS = 120.0


def until(
    is_so: Callable[[], Any],
    what: str,
    patience_seconds: float = WAIT_SECONDS,
    instead: Callable[[], Any] = lambda: "",
) -> Any:
    """Wait until it is so; what it then is. `instead` is what a failure shows."""
    deadline = time.monotonic() + patience_seconds
    while not (found := is_so()):
        assert time.monotonic() < deadline, f"never: {what}; instead: {instead()}"
        time.sleep(0.1)
    return found


def ask(server: PrefectServer, path: str, body: dict[str, Any] | None = None) -> Any:
    """What the server answers, when it can."""
    return retry_while_busy(lambda: server.query(path, body))


def retry_while_busy(call: Callable[[], Any]) -> Any:
    """Call the server until it can answer: SQLite may be locked for a while on a busy machine."""

    def answered() -> list[Any]:
        try:
            return [call()]
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                raise
            return []

    return until(answered, "an answer of the server")[0]
