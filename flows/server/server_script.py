"""The script that serves Prefect's API and UI; `prefect_server` starts it by path.

It takes a listening socket from its parent, and serves until its standard input ends. The parent
holds the other end and never writes to it. So a parent that asks for a stop and a parent that dies,
SIGKILL included, look the same from here; only the time limits differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import select
import socket
import sys
import threading
import time

if __name__ == "__main__":
    # Python puts a script's folder first on sys.path, where our modules' short names could hide
    # other packages. (`python -m` would put the user's working folder there instead.)
    sys.path.pop(0)

import uvicorn

LOCK = "trialflow-server.lock"
PARENT_POLL_SECONDS = 1.0
CONNECTIONS_TIMEOUT_SECONDS = 1
# A living parent waits for the backlog while there is progress.
BACKLOG_STALL_SECONDS = 10.0
# Without a parent, the server must be gone within 10 s.
ORPHAN_BACKLOG_TIMEOUT_SECONDS = 3.0
ORPHAN_SHUTDOWN_TIMEOUT_SECONDS = 7.0


class RunServer(uvicorn.Server):
    """A uvicorn server that ends with its parent, after Prefect has stored all messages."""

    def __init__(self, config: uvicorn.Config, parent_pid: int) -> None:
        super().__init__(config)
        self.parent_pid = parent_pid

    def is_orphan(self) -> bool:
        return os.getppid() != self.parent_pid

    def stop_with_parent(self) -> None:
        """Block until the parent asks for a stop or dies; then stop the server, or the process.

        The parent's pid is watched as well as the pipe: a process that the parent forked may hold
        the pipe open after the parent's death.
        """
        while not self.is_orphan():
            if select.select([sys.stdin.fileno()], [], [], PARENT_POLL_SECONDS)[0]:
                break
        self.should_exit = True
        while not self.is_orphan():
            time.sleep(PARENT_POLL_SECONDS)
        time.sleep(ORPHAN_SHUTDOWN_TIMEOUT_SECONDS)
        os._exit(1)  # the shutdown hangs, else it would have ended this daemon thread

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Prepare the database, then serve; one server of a PREFECT_HOME at a time.

        Prefect's migrations fail if two servers run them at once on a new database.
        """
        from prefect.settings import get_current_settings

        with (get_current_settings().home / LOCK).open("w") as lock:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for Prefect's backlog, then shut down as uvicorn does."""
        await self.wait_for_backlog()
        await super().shutdown(sockets)
        if self.started:
            await close_database()

    async def wait_for_backlog(self) -> None:
        """Return when Prefect's services have handled all messages, or make no progress."""
        began = progressed = time.monotonic()
        left = message_backlog()
        while left > 0:
            await asyncio.sleep(0.02)
            now = time.monotonic()
            if message_backlog() != left:
                left, progressed = message_backlog(), now
            if self.is_orphan() and now - began > ORPHAN_BACKLOG_TIMEOUT_SECONDS:
                return
            if now - progressed > BACKLOG_STALL_SECONDS:
                return


async def close_database() -> None:
    """Close the connections that Prefect leaves open, so that SQLite merges its write-ahead log."""
    from prefect.server.database import provide_database_interface

    engine = await provide_database_interface().engine()
    await engine.dispose()


def message_backlog() -> int:
    """Return how many messages Prefect's services have received and not yet handled.

    Prefect cancels its services at the end, and queued messages are lost: the last states of task
    runs would be missing. Prefect's own log shows the same counters.
    """
    from prefect.server.utilities.messaging.memory import METRICS

    return sum(topic["published"] - topic["consumed"] for topic in METRICS.values())


def main(listener_fd: int, parent_pid: int) -> None:
    """Serve on the listening socket `listener_fd` until the parent stops this process, or dies."""
    config = uvicorn.Config(
        "trialflow.flows.server.request_guard:guarded_prefect",
        factory=True,
        lifespan="on",
        log_level="warning",
        timeout_graceful_shutdown=CONNECTIONS_TIMEOUT_SECONDS,
    )
    server = RunServer(config, parent_pid)
    threading.Thread(target=server.stop_with_parent, daemon=True).start()
    server.run(sockets=[socket.socket(fileno=listener_fd)])
    if not server.started:
        sys.exit(3)
    # Everything is stored and closed. A regular interpreter exit would take another 1.5 s.
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
