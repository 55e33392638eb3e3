"""Keeps a run's reports while the Prefect server does not answer, and sends them once it does.

Training needs no server. But Prefect's clients drop messages that they cannot send: task states,
which travel as events, after about 8 seconds, and log lines after a minute. Within `reports_kept`
both are kept until the server answers, or until its outage is too long.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from prefect.client.orchestration import get_client
from prefect.events import clients
from prefect.events.worker import EventsWorker, emit_events_to_cloud
from prefect.logging.handlers import APILogWorker, set_api_log_sink
from websockets.exceptions import ConnectionClosedError, InvalidHandshake
from websockets.frames import CloseCode

from trialflow.tasks.client_retries import client_retries

RETRY_SECONDS = 1.0
# How long the last reports of a flow may take if the server goes away once more.
LAST_REPORTS_SECONDS = 60.0
# So many logins, one a second, are lost before a warning.
LOST_LOGINS = 60
# The server is busy, or asks for patience: no fault of the request.
_TRY_AGAIN = (httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_MANY_REQUESTS)


class ServerOutage:
    """How long the Prefect server has not answered this process. Any thread may use it.

    Args:
        limit_seconds: how long a run waits for the server; None for no limit.
        clock: seconds that never go backwards.

    Attributes:
        answers: how many answers were noted.
    """

    def __init__(
        self, limit_seconds: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit_seconds = limit_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._since: float | None = None
        self.answers = 0

    def answered(self) -> None:
        """Note an answer: the outage is over."""
        with self._lock:
            self._since = None
            self.answers += 1

    def did_not_answer(self, answers_before: int) -> None:
        """Note a request without an answer: an outage begins, or continues.

        Args:
            answers_before: `answers` when the request was sent. If another request was answered
                since, this one is older than the end of the outage, and proves nothing.
        """
        with self._lock:
            if self._since is None and self.answers == answers_before:
                self._since = self._clock()

    @property
    def is_on(self) -> bool:
        """True if the last request had no answer."""
        return self._since is not None

    @property
    def is_too_long(self) -> bool:
        """True if the outage has reached its limit."""
        since, limit = self._since, self.limit_seconds  # another thread may end it meanwhile
        return since is not None and limit is not None and self._clock() - since >= limit


_prefects_login = clients.PrefectEventsClient._auth_handshake
_lost_logins = 0
_installing = threading.Lock()
_waiting: list[ServerOutage] = []
"""The outages of the blocks that this process is in; flows may be nested, or run in threads."""


@contextmanager
def reports_kept(outage: ServerOutage) -> Iterator[None]:
    """Keep events and log lines of the block's flow during an outage.

    After the last block of the process they are sent in the background, within a minute. If the
    server does not answer then, they are given up: the process must be able to end. Prefect Cloud
    has a separate client.
    """
    if emit_events_to_cloud():
        yield
        return
    with _installing:
        _waiting.append(outage)
        if len(_waiting) == 1:
            _install()
    try:
        yield
    finally:
        with _installing:
            _waiting.remove(outage)
            if not _waiting:
                _uninstall(is_away=outage.is_on)


def _install() -> None:
    if InvalidHandshake not in clients.RETRYABLE_EXCEPTIONS:
        # The error if a proxy answers in place of the server, or if the server is ending.
        clients.RETRYABLE_EXCEPTIONS = (*clients.RETRYABLE_EXCEPTIONS, InvalidHandshake)
    if clients.PrefectEventsClient._auth_handshake is not _log_in:
        clients.PrefectEventsClient._auth_handshake = _log_in  # type: ignore[method-assign, assignment]
    # A subclass would not do: Prefect sends nothing by unknown clients.
    EventsWorker.set_client_override(
        clients.PrefectEventsClient,
        api_url=str(get_client(sync_client=True).api_url),  # no setting has a temporary server's
        reconnection_attempts=sys.maxsize,  # `_uninstall` ends them
    )
    set_api_log_sink(lambda log: PatientLogWorker.instance().send(log))


async def _log_in(client: clients.PrefectEventsClient) -> None:
    """Prefect's login, but a connection that is lost meanwhile is tried again.

    Prefect takes it for a refused login, which violates the server's policy, and gives up all
    events that wait for the connection. If no login succeeds, as behind a proxy that closes
    websockets, its warning tells what is lost.
    """
    global _lost_logins
    try:
        await _prefects_login(client)
        _lost_logins = 0
    except Exception as error:
        lost = error.__cause__
        if not isinstance(lost, ConnectionClosedError):
            raise
        if lost.rcvd is not None and lost.rcvd.code == CloseCode.POLICY_VIOLATION:
            raise
        _lost_logins += 1
        if _lost_logins == LOST_LOGINS:
            client._log_connection_error(lost)
        raise lost from None


def _uninstall(is_away: bool) -> None:
    workers: list[APILogWorker | EventsWorker] = [
        EventsWorker.instance(), PatientLogWorker.instance()
    ]  # fmt: skip
    EventsWorker.set_client_override(None)
    # Prefect's own log worker would wait a minute for the last lines.
    set_api_log_sink(_dropping(LAST_REPORTS_SECONDS) if is_away else None)
    for worker in workers:
        _end(worker, 0.0 if is_away else LAST_REPORTS_SECONDS)


def _dropping(seconds: float) -> Callable[[dict[str, Any]], None]:
    """A sink that drops log lines for some time, and then sends them as Prefect does."""
    end = time.monotonic() + seconds

    def sink(log: dict[str, Any]) -> None:
        if time.monotonic() >= end:
            APILogWorker.instance().send(log)

    return sink


def _end(worker: APILogWorker | EventsWorker, within_seconds: float) -> None:
    """Have a worker end when its queue is empty, or after some time. Does not wait.

    Uses private members: Prefect's own ways wait for the worker, also when the process ends.
    """
    loop, task = worker._loop, worker._task
    worker._drain(at_exit=True)
    if loop is not None and task is not None:
        timer = threading.Timer(within_seconds, loop.call_soon_threadsafe, [task.cancel])
        timer.daemon = True
        timer.start()


class PatientLogWorker(APILogWorker):
    """Sends log lines, and keeps them while the server is away.

    It overrides a private method of Prefect's worker. If that is renamed, Prefect's own worker
    remains, which keeps lines for a minute.
    """

    async def _handle_batch(self, items: list[dict[str, Any]]) -> None:
        while (outage := _bearable()) is not None:
            answers_before = outage.answers
            try:
                with client_retries(0):
                    await self._client.create_logs(items)
            except (httpx.TransportError, httpx.HTTPStatusError) as error:
                if isinstance(error, httpx.HTTPStatusError) and _is_final(error.response):
                    raise
                outage.did_not_answer(answers_before)
                await asyncio.sleep(RETRY_SECONDS)
            else:
                outage.answered()
                return
        await super()._handle_batch(items)


def _bearable() -> ServerOutage | None:
    """Return an outage that a flow of this process still waits for, or None."""
    return next((each for each in [*_waiting] if not each.is_too_long), None)


def _is_final(answer: httpx.Response) -> bool:
    return answer.is_client_error and answer.status_code not in _TRY_AGAIN
