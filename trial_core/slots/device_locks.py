"""Accelerators of this machine that one run has for itself.

For runs that share a machine: each holds the kernel's lock on a file for every device that it
uses. So a device is free again when its run's driver is gone, whatever the end.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from trial_core.errors import LaunchError
from trial_core.slots.accelerators import visible_accelerators

LOOK_SECONDS = 1.0
LOCKS_VARIABLE = "TRIALFLOW_LOCKS"

# File descriptors that hold locks. A process that is forked from this one would hold them on.
_held: set[int] = set()


def locks_folder() -> Path:
    """Where all users of this machine find the same locks: where TRIALFLOW_LOCKS says, which a
    container needs, whose own folders nobody shares; else among its temporary files."""
    return Path(os.environ.get(LOCKS_VARIABLE) or Path(tempfile.gettempdir(), "trialflow-devices"))


@contextmanager
def reserve_devices(
    count: int, environment: Mapping[str, str], when_waiting: Callable[[], None]
) -> Iterator[dict[str, str]]:
    """Have `count` devices that no other run has that asks like this; waits for them.

    Args:
        environment: what says which devices there are to choose from.
        when_waiting: called once, if some are taken.

    Returns:
        The variables that make them, and no others, visible to the ranks.

    Raises:
        LaunchError: there are not so many, or there is no place for locks.
    """
    variable, devices = visible_accelerators(environment)
    if count > len(devices):
        raise LaunchError(
            f"the run needs {count} devices, and this machine has {len(devices)} for it"
        )
    mine: dict[str, int] = {}
    try:
        has_waited = False
        while not _take_free_ones(devices, count, mine):
            if not has_waited:
                when_waiting()
            has_waited = True
            time.sleep(LOOK_SECONDS)
        yield {variable: ",".join(name for name in devices if name in mine)}
    finally:
        _give_back(mine)


def _take_free_ones(devices: list[str], count: int, mine: dict[str, int]) -> bool:
    """Take what is free until there are `count`; whether there are. Holds none otherwise: two that
    wait for the rest of each other's would wait for ever."""
    for name in devices:
        if len(mine) < count and (lock := _lock_of(name)) is not None:
            mine[name] = lock
    if len(mine) == count:
        return True
    _give_back(mine)
    return False


def _lock_of(device: str) -> int | None:
    """The lock on a device, if nobody has it."""
    folder = locks_folder()
    try:
        lock = _open(folder, device.replace(os.sep, "_"))
    except OSError as error:
        raise LaunchError(
            f"no file for the lock on device {device} can be opened in {folder}: {error}; set "
            f"{LOCKS_VARIABLE} to a folder in which all who train on this machine may create files"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    except OSError:  # a file system without locks
        os.close(lock)
        raise LaunchError(
            f"{folder} knows no locks; set {LOCKS_VARIABLE} to a folder of a local disk"
        ) from None
    _held.add(lock)
    return lock


def _open(folder: Path, name: str) -> int:
    """A file in the folder of locks, made if need be, as all users may open it."""
    if not folder.is_dir():
        folder.mkdir(exist_ok=True)
        folder.chmod(0o1777)
    # Where others may create files, who did not may not say O_CREAT.
    with contextlib.suppress(FileExistsError):
        os.close(os.open(folder / name, os.O_CREAT | os.O_EXCL | os.O_RDONLY, 0o444))
    return os.open(folder / name, os.O_RDONLY)


def _give_back(mine: dict[str, int]) -> None:
    for lock in mine.values():
        if lock in _held:
            _held.discard(lock)
            os.close(lock)
    mine.clear()


def _let_go() -> None:
    """In a process that has just been forked: leave the locks to its parent."""
    for lock in _held:
        os.close(lock)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
