"""Uploads a run's files that belong to no checkpoint: TensorBoard event files, profiler traces.

They may grow while they are uploaded. They are stored below ``runs/{trial}``; no manifest lists
them.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trial_core.checkpoint import layout
from trial_core.checkpoint.storage.parallel import CancelSignal
from trial_core.checkpoint.storage.storage_errors import ErrorTranslator
from trial_core.checkpoint.store import CheckpointStore

_logger = logging.getLogger(__name__)

TENSORBOARD = "tensorboard"


def rank_folder(rank: int) -> str:
    """The folder of a rank's event files and traces; TensorBoard shows each folder as a run."""
    return f"{TENSORBOARD}/rank-{rank}"


def tensorboard_url(store: CheckpointStore, trial: str) -> str:
    """The URL of a trial's event files and traces, without credentials."""
    return f"{store.url}/{layout.run_folder(trial)}/{TENSORBOARD}"


class RunFiles:
    """Uploads the files of `folder`, which need not exist yet, that are new or have changed, to
    `into` below the trial's folder in the storage. For one thread at a time. `scratch`: a folder
    for temporary copies, on a disk with room for one file."""

    def __init__(
        self, store: CheckpointStore, trial: str, folder: Path, into: str, scratch: Path
    ) -> None:
        self._store = store
        self._trial = trial
        self._folder = folder
        self._into = into
        self._scratch = scratch
        self._uploaded: dict[Path, tuple[int, int]] = {}

    def upload_changed(self) -> int:
        """Upload all new and changed files; return their number. Raises StorageError if the storage
        failed, or the folder cannot be read; files uploaded before are not uploaded again."""
        with ErrorTranslator(str(self._folder)).translated("read the files to upload in"):
            changed = {
                path: stamp
                for path in _files_in(self._folder)
                if self._uploaded.get(path) != (stamp := _stamp(path))
            }
        for path, stamp in changed.items():
            inner = path.relative_to(self._folder).as_posix()
            key = layout.run_file_key(self._trial, f"{self._into}/{inner}")
            with ErrorTranslator(str(self._scratch)).translated("copy the files to upload into"):
                upload_copy(self._store, path, key, self._scratch, CancelSignal())
            self._uploaded[path] = stamp
        return len(changed)


def upload_copy(
    store: CheckpointStore, path: Path, key: str, scratch: Path, stop: CancelSignal
) -> None:
    """Upload a copy of a file: it is being written, and an upload must be of one state."""
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch, prefix="upload-") as folder:
        copy = Path(shutil.copyfile(path, Path(folder) / path.name))
        store.storage.upload(copy, key, stop)


def _files_in(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        if layout.is_file_path(path.relative_to(folder).as_posix()):
            yield path
        else:
            _logger.warning("not uploaded: the name %r is not allowed in the storage", str(path))


def _stamp(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns
