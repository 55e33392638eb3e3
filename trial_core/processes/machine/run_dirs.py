"""Ids of trials, and the folders of their runs on this machine."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock

from trial_core.checkpoint.layout import checked_trial
from trial_core.common.text_format import slug
from trial_core.errors import TrialBusy, TrialflowError
from trial_core.processes.machine.memory_files import take_memory_links

LOCK = "lock"
_FOR = ", for "
POLL_SECONDS = 0.2
UNIQUE_DIGITS = 12
"""Hexadecimal digits of a trial's id. Its number fits 64 bits, and JSON's numbers; `own_trial`
refuses an id that is taken."""
RANK_FILE_FOLDERS = ("staging", "restored")
"""The folders that ranks write: snapshots before their upload, and fetched checkpoints."""

CODE = "code"
"""The folder with the code of a checkpoint, if the run uses that."""

KEPT = "kept"
"""The folder of the newest committed checkpoint's files, from which a restart reads them:
the files that were staged on disk, and links to memory files that the fork server keeps."""

RUN_DIR_VARIABLE = "TRIALFLOW_RUN_DIR"
"""Set on ranks of another machine than the driver's: the run's folder there."""


def rank_run_dir(on_driver: str) -> Path:
    """The run's folder on the calling rank's machine; `on_driver` is the driver's folder."""
    return Path(os.environ.get(RUN_DIR_VARIABLE, on_driver))


def home_folder() -> Path:
    """The folder of all runs: ``$TRIALFLOW_HOME``, else ``./trialflow-runs``; absolute."""
    home = os.environ.get("TRIALFLOW_HOME") or "trialflow-runs"
    return Path(os.path.abspath(os.path.expanduser(home)))


def run_dir_of(trial: str) -> Path:
    """The folder of a trial's runs on this machine; absolute. Raises as `checked_trial`."""
    return home_folder() / checked_trial(trial)


def trial_id(name: str, unique: str) -> str:
    """A trial's id, from its experiment's name and a unique id."""
    # The last digits: Prefect's ids begin with the time, so ids of one schedule begin alike.
    return f"{slug(name)}-{unique.replace('-', '')[-UNIQUE_DIGITS:]}"


@contextmanager
def locked_run_dir(trial: str, timeout_seconds: float = 0.0, task: str = "") -> Iterator[Path]:
    """Lock the folder of `trial` on this machine for the block, and yield it.

    `task` is what this process does, if that is not to train this one trial: `holder_of` tells it.

    Deletes the files that the ranks of an earlier process left there. At the end, also deletes a
    folder that holds nothing but the lock, as after a refused run. The kernel frees the lock when
    this process ends, even if a forked child lives on. On a file system without locks, nothing is
    locked.

    Raises:
        CheckpointError: no trial may have this id.
        TrialBusy: another process trains the trial.
        TrialflowError: the folder cannot be created.
    """
    run_dir = run_dir_of(trial)
    path = run_dir / LOCK
    lock = filelock.FileLock(path, thread_local=False, fallback_to_soft=False)
    with explaining_errors(run_dir):
        _make_lock_file(path)
    try:
        try:
            lock.acquire(timeout=timeout_seconds, poll_interval=POLL_SECONDS)
        except FileNotFoundError:  # a run that was refused has just deleted the folder
            _make_lock_file(path)
            lock.acquire(timeout=timeout_seconds, poll_interval=POLL_SECONDS)
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        path.write_text(f"{holder}{_FOR}{task}" if task else holder)
    except filelock.Timeout:
        holder = (path.exists() and path.read_text(errors="replace")) or "another process"
        raise TrialBusy(
            f"trial {trial} is being trained by {holder}; wait until that process has ended, stop "
            "it, or train another trial"
        ) from None
    except OSError:
        pass  # a file system without locks
    try:
        clear_rank_files(run_dir)
        take_memory_links(run_dir / KEPT)  # of a process that has ended
        yield run_dir
    finally:
        if lock.is_locked:
            with suppress(OSError):
                # A process that waits for the lock notices that its file is gone, and makes one.
                if os.listdir(run_dir) == [LOCK]:
                    path.unlink()
                    run_dir.rmdir()
        lock.release()


@contextmanager
def locked_if_ended(run_dir: Path) -> Iterator[bool]:
    """Lock a run's folder for the block. False if a process has it, or its disk has no locks."""
    lock = filelock.FileLock(run_dir / LOCK, thread_local=False, fallback_to_soft=False)
    with suppress(OSError):  # also filelock's `Timeout`
        lock.acquire(timeout=0)
    try:
        yield lock.is_locked
    finally:
        lock.release()


def holder_of(run_dir: Path) -> str | None:
    """The process that trains the trial of a folder now: ``process 7 on node-1``; or None.

    With its task, if it has another one: ``process 7 on node-1, for search toy-search-4f``.
    """
    path = run_dir / LOCK
    if path.exists():
        with locked_if_ended(run_dir) as has_ended, suppress(FileNotFoundError):  # just deleted
            return None if has_ended else path.read_text(errors="replace")
    return None


def task_of(holder: str) -> str:
    """The task in a text of `holder_of`, or empty."""
    return holder.partition(_FOR)[2]


def _make_lock_file(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def prepare_run_dir(trial: str) -> Path:
    """Prepare the folder of `trial` on a machine that does not hold the run's lock.

    Deletes the files that the ranks of an earlier process left there. Raises as `locked_run_dir`.
    """
    run_dir = run_dir_of(trial)
    with explaining_errors(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    clear_rank_files(run_dir)
    return run_dir


def clear_rank_files(run_dir: Path) -> None:
    """Delete the local files of ranks that have ended. Call it only while no rank runs there."""
    for folder in RANK_FILE_FOLDERS:
        shutil.rmtree(run_dir / folder, ignore_errors=True)


def clear_kept(run_dir: Path) -> None:
    """Delete the files that were kept for a restart, at the end of the trial."""
    shutil.rmtree(run_dir / KEPT, ignore_errors=True)


@contextmanager
def explaining_errors(run_dir: Path) -> Iterator[None]:
    """Turn an error of creating a run's folder in the block into `TrialflowError`."""
    try:
        yield
    except OSError as error:
        raise TrialflowError(
            f"cannot create the run's folder {run_dir}: {error.strerror}; set TRIALFLOW_HOME to a "
            "folder that can be written"
        ) from error
