"""One `trialflow up` of a PREFECT_HOME at a time.

A second one would serve the same database on another port, take runs from the same queue, and put
back what the first one's worker is just starting.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trial_core.errors import ConfigError

LOCK = "trialflow-up.lock"


@contextmanager
def single_instance(home: Path) -> Iterator[Callable[[str], None]]:
    """Be the only one in the folder `home` for the length of the block.

    The kernel's lock, which goes with its holder, SIGKILL included.

    Returns:
        Tells those who come later where the server is: its API's address.

    Raises:
        ConfigError: there is one, or there can be no lock.
    """
    home.mkdir(parents=True, exist_ok=True)
    # Not emptied: it may be the other one's.
    with (home / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(_refusal(home, file.name, error)) from None

        def say(api_url: str) -> None:
            _write(file.fileno(), f"process {os.getpid()}, at {api_url}")

        _write(file.fileno(), f"process {os.getpid()}, which is starting")
        yield say


def _refusal(home: Path, lock: str, error: OSError) -> str:
    if error.errno != errno.EWOULDBLOCK:
        return f"{lock} cannot be locked ({error}): set PREFECT_HOME to a folder of a local disk"
    return (
        f"`trialflow up` runs already in {home}: {Path(lock).read_text()}. Use that one "
        "(PREFECT_API_URL is its address), or stop it (Ctrl-C); for another one beside it, set "
        "PREFECT_HOME to a folder of its own"
    )


def _write(fd: int, text: str) -> None:
    os.ftruncate(fd, 0)
    os.write(fd, text.encode())  # appended
