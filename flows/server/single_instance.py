"""One `trialflow up` per PREFECT_HOME at a time.

A second one would serve the same database on another port, take runs from the same queue, and
requeue runs that the first one's worker is starting. Commands find the address of the one that
runs here, so that they use its server and start none.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trial_core.errors import ConfigError

LOCK = "trialflow-up.lock"
POLL_SECONDS = 0.2
_ADDRESS = re.compile(r", at (?P<api_url>\S+)")


@contextmanager
def single_instance(home: Path) -> Iterator[Callable[[str], None]]:
    """Hold the folder's lock for the block. The kernel releases it if this process is killed.

    Returns:
        A function that stores the API's address, for the message that a second instance shows.

    Raises:
        ConfigError: another process holds the lock, or the file system has no locks.
    """
    home.mkdir(parents=True, exist_ok=True)
    with (home / LOCK).open("a+") as file:  # not truncated: the holder's description is in it
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"`trialflow up` already runs in {home}: {Path(file.name).read_text()}. Use that "
                "server, as `trialflow train` does by itself, or stop it (Ctrl-C). For a second "
                "server, set PREFECT_HOME to another folder"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"{file.name} cannot be locked ({error}): set PREFECT_HOME to a folder on a local "
                "disk"
            ) from None

        def describe(text: str) -> None:
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"process {os.getpid()}, {text}".encode())

        describe("which is starting")
        yield lambda api_url: describe(f"at {api_url}")


def address_of_running(
    home: Path, waiting_for: Callable[[str], object] = lambda what: None
) -> str | None:
    """Return the API's address of the `trialflow up` with this PREFECT_HOME; None if none runs.

    Waits while it is starting.

    Args:
        waiting_for: called once before such a wait, with a text about it.
    """
    is_told = False
    while (record := _record_of_running(home)) is not None:
        if found := _ADDRESS.search(record):
            return found["api_url"]
        if not is_told:
            waiting_for(f"waiting for `trialflow up` ({record})")
            is_told = True
        time.sleep(POLL_SECONDS)
    return None


def _record_of_running(home: Path) -> str | None:
    try:
        with (home / LOCK).open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read()
    except OSError:  # no such file, or no locks: then `trialflow up` does not run here either
        return None
    return None  # left by one that has ended
