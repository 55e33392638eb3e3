"""Reserves accelerators for one run, where several runs share a machine.

Each run holds the kernel's lock on one file per device. The kernel frees the locks when the run's
driver ends, also by SIGKILL and while a forked child lives on.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import filelock

from trial_core.errors import LaunchError
from trial_core.slots.accelerators import device_uuids, visible_accelerators

POLL_SECONDS = 1.0
LOCKS_VARIABLE = "TRIALFLOW_LOCKS"


def locks_folder() -> Path:
    """The folder of the lock files, the same one for all users of this machine.

    ``TRIALFLOW_LOCKS``, or a temporary folder. Containers must set it to a shared volume.
    """
    return Path(os.environ.get(LOCKS_VARIABLE) or Path(tempfile.gettempdir(), "trialflow-devices"))


@contextmanager
def reserve_devices(
    count: int, environment: Mapping[str, str], when_waiting: Callable[[], None]
) -> Iterator[dict[str, str]]:
    """Reserve `count` devices for the length of the block; waits until they are free.

    Args:
        environment: variables that limit which devices there are.
        when_waiting: called once, if the run has to wait.

    Yields:
        The variables that make only these devices visible to the ranks.

    Raises:
        LaunchError: the machine has fewer devices, or the lock files cannot be used.
    """
    accelerators = visible_accelerators(environment)
    # By UUIDs: another run may name the same device by its index.
    devices = device_uuids(accelerators)
    if count > len(devices):
        raise LaunchError(f"the run needs {count} devices, but this machine has {len(devices)}")
    with ExitStack() as locks:
        has_waited = False
        while (reserved := _lock_free_devices(devices, count, locks)) is None:
            if not has_waited:
                when_waiting()
            has_waited = True
            time.sleep(POLL_SECONDS)
        yield {accelerators.variable: ",".join(reserved)}


def _lock_free_devices(
    devices: Mapping[str, str], count: int, locks: ExitStack
) -> list[str] | None:
    """Lock the first `count` free devices; None, and no lock, if fewer are free.

    Keeping some locks while waiting for others would deadlock two runs.

    Args:
        devices: the UUID of each device.
    """
    reserved: list[str] = []
    with ExitStack() as attempt:
        for device, uuid in devices.items():
            if len(reserved) < count and (lock := _lock(uuid)) is not None:
                attempt.callback(lock.release)
                reserved.append(device)
        if len(reserved) < count:
            return None
        locks.push(attempt.pop_all())
    return reserved


def _lock(device: str) -> filelock.BaseFileLock | None:
    """The acquired lock of a device; None if another run holds it."""
    folder = locks_folder()
    path = folder / f"{device.replace(os.sep, '_')}.lock"
    # 0o666: every user of the machine must be able to open the file.
    lock = filelock.FileLock(path, mode=0o666, thread_local=False, fallback_to_soft=False)
    try:
        if not folder.is_dir():
            folder.mkdir(exist_ok=True)
            folder.chmod(0o1777)
        lock.acquire(blocking=False)
    except filelock.Timeout:
        return None
    except OSError as error:
        raise LaunchError(
            f"cannot lock device {device} in {folder}: {error}; set {LOCKS_VARIABLE} to a folder "
            "on a local disk in which every user who trains on this machine may create files"
        ) from error
    return lock
