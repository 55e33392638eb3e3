"""Requests to the Prefect server that fail: their exceptions, and how often they are repeated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from prefect.context import SettingsContext, get_settings_context
from prefect.exceptions import PrefectException

NO_ANSWER = (httpx.HTTPError, PrefectException, OSError, ValueError, RuntimeError)
"""The server did not answer a request, or something else did in its place."""


@contextmanager
def client_retries(most: int) -> Iterator[None]:
    """Have this context's requests to the Prefect server repeated at most `most` times.

    Prefect's own pauses double: a server that is back after a while would wait for minutes.

    `prefect.settings.temporary_settings` reads and checks all settings again, 55 ms of processor
    time, which a run would take from its ranks every few seconds. This copies them: 0.1 ms.
    """
    now = get_settings_context()
    client = now.settings.client.model_copy(update={"max_retries": most})
    settings = now.settings.model_copy(update={"client": client})
    with SettingsContext(profile=now.profile, settings=settings):
        yield
