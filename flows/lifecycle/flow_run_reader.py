"""Reads a flow run from the server, and tells a deleted run from a server that answers 404.

A proxy may answer 404 while the server behind it restarts. So may another service at its address.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound, PrefectException

# A run counts as deleted if a healthy server has not known it for this long.
DELETION_SECONDS = 60.0


class FlowRunReader:
    """Reads one flow run. Several threads may use it."""

    def __init__(self, flow_run_id: UUID, clock: Callable[[], float] = time.monotonic) -> None:
        self.flow_run_id = flow_run_id
        self._clock = clock
        self._missing_since: float | None = None
        self._is_deleted = False

    def read(self) -> FlowRun | None:
        """The flow run; None if it was deleted: a healthy server did not know it for a minute.

        Raises:
            ObjectNotFound: the answer is 404, and does not yet prove a deletion.
            httpx.HTTPError, PrefectException: the server did not answer.
        """
        if self._is_deleted:
            return None
        missing_since = None
        try:
            with get_client(sync_client=True) as client:
                try:
                    return client.read_flow_run(self.flow_run_id)
                except ObjectNotFound:
                    if not is_healthy(client):
                        raise
                    now = self._clock()
                    missing_since = now if self._missing_since is None else self._missing_since
                    self._is_deleted = now - missing_since >= DELETION_SECONDS
                    if not self._is_deleted:
                        raise
                    return None
        finally:
            self._missing_since = missing_since


def is_healthy(client: SyncPrefectClient) -> bool:
    """Return whether the health check gives Prefect's answer, the JSON value true."""
    try:
        return client.request("GET", "/health").json() is True
    except (httpx.HTTPError, PrefectException, ValueError):
        return False
