"""The local server: the Prefect server of `trialflow up`, with all its services.

It schedules runs, cleans up, and acts on automations. Its database is the user's (PREFECT_HOME).
"""

from __future__ import annotations

from pathlib import Path

from trialflow.flows.server.prefect_server import PrefectServerProcess

PERSISTENT_LEASE_STORAGE = "prefect.server.concurrency.lease_storage.filesystem"
SETTINGS = {
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": PERSISTENT_LEASE_STORAGE,
    # How long no server may have run (ISO 8601). By default Prefect drops automation triggers that
    # came due more than a minute before the start: runs lost with the last server would stay lost.
    "PREFECT_SERVER_EVENTS_EXPIRED_BUCKET_BUFFER": "P30D",
    # How soon the server notices a crashed run; by default up to 5 s later.
    "PREFECT_SERVER_EVENTS_PROACTIVE_GRANULARITY": "PT1S",
}


def local_server(port: int, log_path: Path, start_timeout_seconds: float) -> PrefectServerProcess:
    """Return the server of `trialflow up`; it uses any free port if `port` is taken."""
    return PrefectServerProcess(log_path, start_timeout_seconds, port, SETTINGS)
