"""Removes the locks of killed builds of DeepSpeed's extensions.

DeepSpeed compiles an extension on first use. PyTorch lets one process build it while the others
wait until its lock file is removed. A process that is killed while it builds, for example by
Ctrl-C, leaves the lock behind, and every later process would wait forever.
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

# A builder in another container, or on another machine that shares the folder, is not visible as a
# process. But every few minutes it finishes a file.
ABANDONED_SECONDS = 180.0
POLL_SECONDS = 0.5


def clear_interrupted_builds(abandoned_seconds: float = ABANDONED_SECONDS) -> None:
    """Remove the locks of abandoned builds; a later build reuses the files built so far.

    The first rank of each machine calls this before it uses an extension. It waits while a lock has
    no visible owner but may have one on another machine, and logs that. It does not wait for a
    build of a process of this machine.

    Args:
        abandoned_seconds: a lock without a visible owner is removed after its folder has not
            changed for this long.
    """
    for lock in _locks():
        has_logged = False
        while _exists(lock) and not _is_held(lock):
            if time.time() - _last_change(lock.parent) > abandoned_seconds:
                logger.warning(
                    "a build of %s was killed: removing its lock %s", lock.parent.name, lock
                )
                lock.unlink(missing_ok=True)
                break
            if not has_logged:
                logger.warning(
                    "%s is being built on another machine, or its build was killed: waiting until "
                    "the folder of %s has not changed for %.0f s",
                    lock.parent.name, lock, abandoned_seconds,
                )  # fmt: skip
                has_logged = True
            time.sleep(POLL_SECONDS)


def _locks() -> Iterator[Path]:
    """The lock files of all builds."""
    from torch.utils.cpp_extension import get_default_build_root

    if folder := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(folder).glob("*/lock")
    return Path(get_default_build_root()).glob("*/*/lock")  # a folder for each Python and device


def _exists(lock: Path) -> bool:
    try:
        return lock.exists()
    except OSError:  # in another user's folder
        return False


def _is_held(lock: Path) -> bool:
    """Whether a process of this machine has the lock file open, as a builder has."""
    path = str(lock.resolve())
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if any(file.path == path for file in process.open_files()):
                return True
    return False


def _last_change(folder: Path) -> float:
    """The newest modification time in a folder, in seconds since the epoch."""
    times = [0.0]
    for file in folder.iterdir():
        with suppress(OSError):  # deleted meanwhile
            times.append(file.stat().st_mtime)
    return max(times)
