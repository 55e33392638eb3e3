"""The process that serves Prefect's API and UI to one run; `trialflow.flows.server.embedded` starts it, by path.

It takes a listening socket from its parent and serves until its standard input ends. The parent
holds the other end and never writes to it, so asking for a stop and dying, SIGKILL included, look
the same from here, and both end in the same shutdown. Only the patience differs.
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
    # Started by path, Python puts this file's folder first on sys.path, where our modules' short
    # names could hide other packages. (`python -m` would put the user's folder there instead, and
    # a user of Prefect is likely to have a `flows` folder.)
    sys.path.pop(0)

import uvicorn

PARENT_POLL_SECONDS = 1.0
CONNECTIONS_LIMIT_SECONDS = 1
# A parent that has asked for the stop waits as long as there is progress.
STALLED_BACKLOG_SECONDS = 10.0
# A dead parent does not, and nothing may outlive it by 10 s.
BACKLOG_LIMIT_AS_ORPHAN_SECONDS = 3.0
SHUTDOWN_LIMIT_AS_ORPHAN_SECONDS = 7.0


class RunServer(uvicorn.Server):
    """A uvicorn server that goes with its parent, after Prefect has written what it received."""

    def __init__(self, config: uvicorn.Config, parent_pid: int) -> None:
        super().__init__(config)
        self.parent_pid = parent_pid

    def is_orphan(self) -> bool:
        """Whether the parent has died."""
        return os.getppid() != self.parent_pid

    def stop_with_parent(self) -> None:
        """Block until the parent asks for a stop or dies; then stop the server, or the process.

        The parent's pid is watched as well as the pipe, which a process that the parent forked may
        hold open after its death.
        """
        while not self.is_orphan():
            if select.select([sys.stdin.fileno()], [], [], PARENT_POLL_SECONDS)[0]:
                break
        self.should_exit = True
        while not self.is_orphan():
            time.sleep(PARENT_POLL_SECONDS)
        time.sleep(SHUTDOWN_LIMIT_AS_ORPHAN_SECONDS)
        os._exit(1)  # the shutdown is stuck, else it would have ended this daemon thread

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Prepare the database, then serve; one server of a PREFECT_HOME at a time.

        Prefect's migrations fail when two runs that are a machine's first make them at once.
        """
        from prefect.settings import get_current_settings

        with (get_current_settings().home / "trialflow-server.lock").open("w") as lock:
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
        """Return when Prefect's services have dealt with all they were sent, or are stuck."""
        began = progressed = time.monotonic()
        left = message_backlog()
        while left > 0:
            await asyncio.sleep(0.02)
            now = time.monotonic()
            if message_backlog() != left:
                left, progressed = message_backlog(), now
            if self.is_orphan() and now - began > BACKLOG_LIMIT_AS_ORPHAN_SECONDS:
                return
            if now - progressed > STALLED_BACKLOG_SECONDS:
                return


async def close_database() -> None:
    """Close the connections Prefect leaves open, so that SQLite folds its log into the database."""
    from prefect.server.database import provide_database_interface

    engine = await provide_database_interface().engine()
    await engine.dispose()


def message_backlog() -> int:
    """How many messages Prefect's services have been sent and have not dealt with.

    Prefect stops them by cancelling their consumers, which drop what is queued: the last states of
    task runs would be missing. Read where Prefect counts them for its own log.
    """
    from prefect.server.utilities.messaging.memory import METRICS

    return sum(topic["published"] - topic["consumed"] for topic in METRICS.values())


def main(listener_fd: int, parent_pid: int) -> None:
    """Serve on the listening socket `listener_fd` until the parent goes."""
    config = uvicorn.Config(
        "prefect.server.api.server:create_app",
        factory=True,
        lifespan="on",
        log_level="warning",
        timeout_graceful_shutdown=CONNECTIONS_LIMIT_SECONDS,
    )
    server = RunServer(config, parent_pid)
    threading.Thread(target=server.stop_with_parent, daemon=True).start()
    server.run(sockets=[socket.socket(fileno=listener_fd)])
    if not server.started:
        sys.exit(3)
    # All is written and closed. Taking the interpreter apart would cost another 1.5 s.
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
