"""Starts a server again that ends by itself, for example when the machine is short of memory.

A server is for watching: training does not need it, and continues meanwhile. Prefect's client
repeats requests for about a minute, so states, log lines and events arrive late.
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
        pause_seconds = 0.0 if was_healthy else min(2 * pause_seconds or 1.0, MAX_PAUSE_SECONDS)
        if is_over.wait(pause_seconds):
            return
        started_at = time.monotonic()
        with contextlib.suppress(OSError):  # the port is taken: after the next pause
            server.restart()
