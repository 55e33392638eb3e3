"""Starts a server again that ends by itself, for example when the machine is short of memory.

A server is for watching: training does not need it, and continues meanwhile. Requests wait until
the server answers again, for up to a minute each, so states, log lines and events arrive late.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from trialflow.flows.server.prefect_server import PrefectServerProcess

POLL_SECONDS = 0.5
# A server that lived this long is started again at once. The pause before others is doubled.
HEALTHY_SECONDS = 60.0
FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 60.0


@contextmanager
def restarting(server: PrefectServerProcess) -> Iterator[None]:
    """Start `server` again, on its port and database, whenever it ends during the block."""
    is_over = threading.Event()
    thread = threading.Thread(target=_keep, args=(server, is_over), name="server-restarts")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _keep(server: PrefectServerProcess, is_over: threading.Event) -> None:
    started_at, pause_seconds = time.monotonic(), 0.0
    while not is_over.wait(POLL_SECONDS):
        if not server.has_ended:
            continue
        was_healthy = time.monotonic() - started_at > HEALTHY_SECONDS
        pause_seconds = min(2 * pause_seconds or FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS)
        pause_seconds = 0.0 if was_healthy else pause_seconds
        for _ in range(round(pause_seconds / POLL_SECONDS)):
            # It has ended several times, and may never answer: clients learn that without delay.
            if pause_seconds > FIRST_PAUSE_SECONDS:
                server.refuse_connections()
            if is_over.wait(POLL_SECONDS):
                return
        started_at = time.monotonic()
        with contextlib.suppress(OSError):  # no memory for a process: after the next pause
            server.restart()
