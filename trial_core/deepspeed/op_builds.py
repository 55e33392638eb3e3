"""What DeepSpeed compiles when it is first used, and builds of it that were killed.

PyTorch has one process build an extension while the others wait for its lock file to go. A process
that is killed while it builds, as by Ctrl-C during a machine's first run, leaves the file behind,
and from then on everybody waits for ever.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

# A builder in another container, or on another machine that shares the folder, is not seen here;
# but every few minutes it finishes a file.
ABANDONED_SECONDS = 180.0
POLL_SECONDS = 0.5


def clear_interrupted_builds(abandoned_seconds: float = ABANDONED_SECONDS) -> None:
    """Remove the locks of builds that nobody carries on; what was built so far is built upon.

    For the first rank of each machine, before it uses an extension: the others wait for it. Blocks
    while it is not certain yet, which is said in the log; a build that goes on is not waited for.

    Args:
        abandoned_seconds: for how long nothing may have changed beside a lock that no process of
            this machine holds.
    """
    for lock in _locks():
        has_said = False
        while _is_there(lock) and not _is_held(lock):
            if time.time() - _last_change(lock.parent) > abandoned_seconds:
                logger.warning("a build of %s was killed: its lock %s goes", lock.parent.name, lock)
                lock.unlink(missing_ok=True)
                break
            if not has_said:
                logger.warning(
                    "%s is being built elsewhere, or its build was killed: waiting until nothing "
                    "has changed beside %s for %.0f s",
                    lock.parent.name, lock, abandoned_seconds,
                )  # fmt: skip
                has_said = True
            time.sleep(POLL_SECONDS)


def _locks() -> Iterator[Path]:
    """The lock files of builds, wherever PyTorch keeps them."""
    from torch.utils.cpp_extension import get_default_build_root

    if chosen := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(chosen).glob("*/lock")
    return Path(get_default_build_root()).glob("*/*/lock")  # a folder for each Python and device


def _is_there(lock: Path) -> bool:
    try:
        return lock.exists()
    except OSError:  # another user's
        return False


def _is_held(lock: Path) -> bool:
    """Whether a process of this machine has it open, as a builder has."""
    path = str(lock.resolve())
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if any(file.path == path for file in process.open_files()):
                return True
    return False


def _last_change(folder: Path) -> float:
    """When anything in a folder was last written, in seconds since the epoch."""
    times = [0.0]
    for file in folder.iterdir():
        with suppress(OSError):  # it has just gone
            times.append(file.stat().st_mtime)
    return max(times)
