"""The names of trials, and the folders of their runs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from trial_core.config import home_folder
from trial_core.errors import TrialflowError
from trial_core.text_format import slug as slug  # part of every trial's id

LOCK = "lock"
LOOK_SECONDS = 0.2
LEFTOVERS = ("staging", "restored")

KEPT = "kept"
"""The folder of the newest committed checkpoint's files, as far as they were staged on disk."""

# Locks that this process holds. A process that it forks (a data loader's worker) would hold them
# on after its death.
_held: set[BinaryIO] = set()


def trial_id(name: str, unique: str) -> str:
    """A trial's id, from its experiment's name and something unique to it."""
    # The last digits: Prefect's ids begin with the time, and those of a schedule are made together.
    return f"{slug(name)}-{unique.replace('-', '')[-8:]}"


@contextmanager
def locked_run_dir(trial: str, patience_seconds: float = 0.0) -> Iterator[Path]:
    """The folder of `trial` on this machine, nobody else's for the length of the block.

    What a dead attempt has left staged there is gone.

    Args:
        patience_seconds: how long to wait for somebody else who has it, and may be about to end.

    Raises:
        TrialflowError: another process trains the trial; or the folder cannot be created.
    """
    run_dir = home_folder() / trial
    with _creating(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / LOCK).open("a+b")
    with lock:
        _hold(lock, trial, time.monotonic() + patience_seconds)
        _held.add(lock)
        try:
            clear_leftovers(run_dir)
            yield run_dir
        finally:
            _release(lock)


def prepare_run_dir(trial: str) -> Path:
    """The folder of `trial` on a machine whose run is held elsewhere, without leftovers.

    Raises:
        TrialflowError: it cannot be created.
    """
    run_dir = home_folder() / trial
    with _creating(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    clear_leftovers(run_dir)
    return run_dir


def clear_leftovers(run_dir: Path) -> None:
    """Delete what a dead attempt has left staged. Only while nobody trains there."""
    for leftover in LEFTOVERS:
        shutil.rmtree(run_dir / leftover, ignore_errors=True)


def clear_kept(run_dir: Path, rank: int | None = None) -> None:
    """The trial has come to its end: delete what was kept of its checkpoint for a restart.

    Args:
        rank: whose part alone, while other ranks may still be putting theirs there.
    """
    for folder in run_dir.glob(f"{KEPT}/*/{'*' if rank is None else f'rank-{rank}'}"):
        shutil.rmtree(folder, ignore_errors=True)
    for emptied in (*run_dir.glob(f"{KEPT}/*"), run_dir / KEPT):
        with contextlib.suppress(OSError):  # others' parts are still in it
            emptied.rmdir()


@contextmanager
def _creating(run_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TrialflowError(
            f"cannot create the run's folder {run_dir}: {error.strerror}; set TRIALFLOW_HOME to a "
            "folder that can be written"
        ) from error


def _hold(lock: BinaryIO, trial: str, deadline: float) -> None:
    """Take the lock, and say in it whose it is. The kernel gives it back, whatever the end."""
    try:
        while not _is_free(lock) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().decode(errors="replace") or "another process"
        raise TrialflowError(
            f"trial {trial} is being trained by {holder}; wait until that has ended, or stop it, "
            "or train another trial"
        ) from None
    except OSError:
        return  # a file system without locks
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
    lock.flush()


def _is_free(lock: BinaryIO) -> bool:
    """Take the lock if nobody has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _release(lock: BinaryIO) -> None:
    """Give the lock back, also where a process that was just forked has it open still."""
    if lock in _held:
        _held.discard(lock)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_UN)


def _let_go() -> None:
    """In a process that has just been forked: leave the locks to its parent."""
    for lock in _held:
        lock.close()
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
