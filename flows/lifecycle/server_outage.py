"""What a run reports while the Prefect server does not answer is sent once it does.

Training needs no server. But Prefect's clients drop what they cannot send: task states, which
travel as events, after about 8 seconds, and log lines after a minute. Within `reports_kept` both
are kept until the server answers, or until its outage is too long.
"""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from prefect.events import clients
from prefect.events.worker import EventsWorker, emit_events_to_cloud
from prefect.logging.handlers import APILogWorker, set_api_log_sink
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from websockets.exceptions import InvalidHandshake

RETRY_SECONDS = 1.0


class ServerOutage:
    """How long the Prefect server has not answered this process. Any thread may use it.

    Args:
        limit_seconds: how long a run waits for the server; None: without limit.
        clock: seconds that never go backwards.
    """

    def __init__(
        self, limit_seconds: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit_seconds = limit_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._since: float | None = None

    def answered(self) -> None:
        """Note an answer: the outage is over."""
        with self._lock:
            self._since = None

    def did_not_answer(self) -> None:
        """Note a request without an answer: an outage begins, or goes on."""
        with self._lock:
            if self._since is None:
                self._since = self._clock()

    @property
    def is_too_long(self) -> bool:
        """Whether the outage has reached its limit."""
        with self._lock:
            if self._since is None or self.limit_seconds is None:
                return False
            return self._clock() - self._since >= self.limit_seconds


_is_installed = threading.Lock()


@contextmanager
def reports_kept(outage: ServerOutage) -> Iterator[None]:
    """Keep events and log lines of the block's flow during an outage.

    They may be sent after the block: Prefect sends what is left when the process ends. An inner
    block does nothing, and Prefect Cloud has a client of its own.
    """
    if emit_events_to_cloud() or not _is_installed.acquire(blocking=False):
        yield
        return
    # One attempt a second. A subclass would not do: Prefect sends nothing by unknown clients.
    attempts = sys.maxsize if outage.limit_seconds is None else math.ceil(outage.limit_seconds)
    retried = clients.RETRYABLE_EXCEPTIONS
    try:
        # Also what a proxy answers in the place of a server, or a server that is ending.
        clients.RETRYABLE_EXCEPTIONS = (*retried, InvalidHandshake)
        EventsWorker.set_client_override(
            clients.PrefectEventsClient, reconnection_attempts=attempts
        )
        set_api_log_sink(lambda log: PatientLogWorker.instance(outage).send(log))
        yield
    finally:
        if outage.is_too_long:
            _abandon(EventsWorker.instance())
        clients.RETRYABLE_EXCEPTIONS = retried
        EventsWorker.set_client_override(None)
        # After an outage that is too long, Prefect's own worker would wait a minute for the last
        # lines. The next block sets it right.
        set_api_log_sink(_drop if outage.is_too_long else None)
        _is_installed.release()


def _drop(log: dict[str, Any]) -> None:
    """Send nothing."""


def _abandon(worker: EventsWorker) -> None:
    """End a worker that cannot send, for which the process would wait at its end.

    By private attributes: Prefect has no other way to end a worker without waiting for it.
    """
    if worker._loop is not None and worker._task is not None:
        worker._loop.call_soon_threadsafe(worker._task.cancel)


class PatientLogWorker(APILogWorker):
    """Sends log lines, and keeps them while the server is away.

    It overrides a private method of Prefect's worker. If that is renamed, Prefect's own patience of
    a minute is left.
    """

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self._outage: ServerOutage = settings[-1]

    async def _handle_batch(self, items: list[dict[str, Any]]) -> None:
        while not self._outage.is_too_long:
            try:
                with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):  # its pauses double
                    await self._client.create_logs(items)
            except (httpx.TransportError, httpx.HTTPStatusError) as error:
                if isinstance(error, httpx.HTTPStatusError) and error.response.is_client_error:
                    raise
                self._outage.did_not_answer()
                await asyncio.sleep(RETRY_SECONDS)
            else:
                self._outage.answered()
                return
