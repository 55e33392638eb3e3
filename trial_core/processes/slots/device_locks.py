"""Reserves accelerators for one run, where several runs share a machine.

Each run holds the kernel's lock on one file per device. A lock belongs to an open file, which the
driver sends to the ranks that it starts: the kernel frees the lock when the driver and all of them
have ended, also by SIGKILL. So a device is not given to another run while a rank that outlives its
driver, for example inside a CUDA call, still has memory there. The fork server passes it on, and
other children of driver and ranks do not keep it.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from trial_core.errors import LaunchError
from trial_core.processes.machine.accelerators import device_uuids, visible_accelerators

POLL_SECONDS = 1.0
LOCKS_VARIABLE = "TRIALFLOW_LOCKS"
DESCRIPTORS_VARIABLE = "TRIALFLOW_DEVICE_LOCKS"
"""The descriptors of a run's locks: in the driver the driver's, in a rank the rank's own ones."""

_held: set[int] = set()
"""The descriptors of the locks that this process holds."""


def locks_folder() -> Path:
    """The folder of the lock files, the same one for all users of this machine.

    ``TRIALFLOW_LOCKS``, or a temporary folder. Containers must set it to a shared volume.
    """
    return Path(os.environ.get(LOCKS_VARIABLE) or Path(tempfile.gettempdir(), "trialflow-devices"))


@contextmanager
def reserve_devices(
    count: int,
    environment: Mapping[str, str],
    when_waiting: Callable[[], None],
    check: Callable[[], None] = lambda: None,
) -> Iterator[dict[str, str]]:
    """Reserve `count` devices for the block, and wait until they are free.

    Args:
        environment: variables that limit the available devices.
        when_waiting: called once, if the run has to wait.
        check: called each second while it waits; it may raise.

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
            check()
            time.sleep(POLL_SECONDS)
        held = ",".join(str(lock) for _, lock in reserved)
        yield {
            accelerators.variable: ",".join(device for device, _ in reserved),
            DESCRIPTORS_VARIABLE: held,
        }


def lock_descriptors(environment: Mapping[str, str]) -> list[int]:
    """The descriptors that these variables, from `reserve_devices`, name."""
    return [int(lock) for lock in environment.get(DESCRIPTORS_VARIABLE, "").split(",") if lock]


def keep_locks(environment: MutableMapping[str, str] = os.environ) -> None:
    """Keep the locks that the driver has sent until this rank ends, but not in its children.

    Called once, when the rank starts. The variable is removed, since children have no use for it.
    """
    for lock in lock_descriptors(environment):
        os.set_inheritable(lock, False)
        _held.add(lock)
    environment.pop(DESCRIPTORS_VARIABLE, None)


def _lock_free_devices(
    devices: Mapping[str, str], count: int, locks: ExitStack
) -> list[tuple[str, int]] | None:
    """Lock the first `count` free devices; return each with the descriptor of its lock.

    If fewer are free, it returns None and keeps no lock: keeping some while waiting for others
    would deadlock two runs. `devices` has the UUID of each device.
    """
    reserved: list[tuple[str, int]] = []
    with ExitStack() as attempt:
        for device, uuid in devices.items():
            if len(reserved) < count and (lock := _lock(uuid)) is not None:
                attempt.callback(_close, [lock])
                reserved.append((device, lock))
        if len(reserved) < count:
            return None
        locks.push(attempt.pop_all())
    return reserved


def _lock(device: str) -> int | None:
    """The descriptor of a device's acquired lock; None if another run holds it.

    filelock would not do: its release frees the lock also for ranks that have inherited it.
    """
    folder = locks_folder()
    try:
        if not folder.is_dir():
            folder.mkdir(exist_ok=True)
            folder.chmod(0o1777)
        lock = _open(folder / f"{device.replace(os.sep, '_')}.lock")
        _held.add(lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            _close([lock])
            raise
    except BlockingIOError:
        return None
    except OSError as error:
        raise LaunchError(
            f"cannot lock device {device} in {folder}: {error}; set {LOCKS_VARIABLE} to a folder "
            "on a local disk in which every user who trains on this machine may create files"
        ) from error
    return lock


def _open(path: Path) -> int:
    """Open a lock file, which every user of the machine must be able to open."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)  # follows no link
    except FileExistsError:
        # Not O_CREAT: Linux refuses it for another user's file in a sticky folder.
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    os.fchmod(lock, 0o666)  # whatever the umask
    return lock


def _close(locks: Iterable[int]) -> None:
    """Close this process's descriptors; a lock is free once no process has it open."""
    for lock in locks:
        _held.discard(lock)
        os.close(lock)


# A forked child that outlives its parent must not keep the locks.
os.register_at_fork(after_in_child=lambda: _close(list(_held)))
