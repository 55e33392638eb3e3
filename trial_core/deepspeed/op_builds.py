"""Builds of DeepSpeed's extensions: avoids one that training never uses, and clears killed ones.

DeepSpeed compiles an extension on first use. On CPU ranks it would always compile one, for minutes:
the shared-memory all-reduce, which only its inference engine calls.

PyTorch lets one process build it while the others
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

import deepspeed.ops
import psutil
from deepspeed.accelerator import get_accelerator
from deepspeed.git_version_info import installed_ops

logger = logging.getLogger(__name__)

# A builder in another container, or on another machine that shares the folder, is not visible as a
# process. But every few minutes it finishes a file.
ABANDONED_SECONDS = 180.0
POLL_SECONDS = 0.5


SHARED_MEMORY_OP = "deepspeed_shm_comm"


def prepare_op_builds(local_rank: int) -> None:
    """Avoid needless builds, and clear killed ones. Every rank calls this before DeepSpeed starts.

    A shared-memory extension that was built when DeepSpeed was installed stays in use.
    """
    if get_accelerator().device_name() == "cpu" and not installed_ops.get(SHARED_MEMORY_OP):
        deepspeed.ops.__compatible_ops__[SHARED_MEMORY_OP] = False
    if local_rank == 0:
        clear_interrupted_builds()


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
