"""The process of a node's agent: `trialflow join`, or this module with the token on its stdin."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock
from setproctitle import setproctitle

from trial_core.errors import LaunchError, TrialflowError
from trial_core.processes.machine.run_dirs import explaining_errors, home_folder
from trial_core.processes.nodes.agent import Agent
from trial_core.processes.nodes.join_token import read_token
from trial_core.processes.slots.fork_server import ForkServer
from trial_core.processes.slots.rank_main import SCRIPT_MODULES, TRIAL_MODULES

PRELOADS = {"trial": TRIAL_MODULES, "script": SCRIPT_MODULES, "none": ()}
"""Modules imported before the agent's ranks are forked."""
WAIT_SECONDS = 300.0
EXIT_SECONDS = 10.0
"""How long the process may take to end, if something hangs in it."""
_LOCK = ".lock"

logger = logging.getLogger(__name__)


def run_agent(
    driver: str,
    token: str,
    *,
    node: str = "",
    slots: int | None = None,
    preload: str = "trial",
    wait_seconds: float = WAIT_SECONDS,
) -> int:
    """Serve a driver until the run has ended, or this node has left it.

    Args:
        driver: the driver's address, as it shows it.
        node, slots: as in `AgentHello`.

    Returns:
        The exit code: 0 at the end of the run; after a signal, 128 plus its number, so that the
        starter of this process may start another.

    Raises:
        LaunchError: the driver cannot be reached, refuses this node, or is gone.
    """
    if slots is not None and slots < 1:
        raise LaunchError(f"a node offers at least one slot, got {slots}")
    setproctitle(f"trialflow: agent of {driver}")
    with node_folder() as folder, ForkServer(PRELOADS[preload]) as fork_server:
        agent = Agent(folder, fork_server, node, slots)
        try:
            asked_by = asyncio.run(agent.serve(driver, token, wait_seconds))
        finally:
            if agent.hangs_in:  # in a thread that Python would wait for
                logger.warning(
                    "this node ends, but %s hangs: is the storage there?", agent.hangs_in
                )
                timer = threading.Timer(EXIT_SECONDS, os._exit, [1])
                timer.daemon = True
                timer.start()
    return 0 if asked_by is None else 128 + asked_by


@contextmanager
def node_folder() -> Iterator[Path]:
    """A folder for one agent, below the home folder, deleted at the end of the block.

    Also deletes the folders of this machine's killed agents. On a file system without locks, which
    does not tell them, they stay. Raises TrialflowError if it cannot be created.
    """
    folders = home_folder() / "nodes" / socket.gethostname()
    with explaining_errors(folders):
        folders.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=folders))
    for path in folders.glob(f"*{_LOCK}"):
        free = filelock.FileLock(path, timeout=0, fallback_to_soft=False)
        with suppress(OSError, filelock.Timeout), free:
            shutil.rmtree(path.with_suffix(""), ignore_errors=True)
            path.unlink()
    path = folder.with_suffix(_LOCK)
    lock = filelock.FileLock(path, fallback_to_soft=False)
    with suppress(OSError):  # a file system without locks
        lock.acquire()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        path.unlink(missing_ok=True)
        lock.release()


def main() -> None:
    parser = argparse.ArgumentParser(prog="trialflow agent")
    parser.add_argument("--driver", required=True)
    parser.add_argument("--node", default="")
    parser.add_argument("--slots", type=int)
    parser.add_argument("--preload", choices=sorted(PRELOADS), default="trial")
    given = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s [agent] %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    try:
        sys.exit(run_agent(token=read_token(None), **vars(given)))
    except TrialflowError as error:
        sys.exit(f"this node ends: {error}")


if __name__ == "__main__":
    main()
