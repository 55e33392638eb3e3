"""A run's files beside its checkpoints (TensorBoard's event files, profiler traces), uploaded.

They keep growing while they are uploaded, and belong to no checkpoint: no manifest lists them. On
local disk they lie in the run's folder, in the storage below ``runs/{trial}``.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trial_core.checkpoint import layout
from trial_core.checkpoint.store import CheckpointStore
from trial_core.storage.parallel import StopSignal
from trial_core.storage.storage_errors import Explainer

_logger = logging.getLogger(__name__)

TENSORBOARD = "tensorboard"


def rank_folder(rank: int) -> str:
    """Where a rank keeps its event files and traces: a folder, and to TensorBoard a run, a rank."""
    return f"{TENSORBOARD}/rank-{rank}"


def tensorboard_url(store: CheckpointStore, trial: str) -> str:
    """Where a trial's event files and traces are stored, for people to read."""
    return f"{store.url}/{layout.run_folder(trial)}/{TENSORBOARD}"


class RunFiles:
    """Uploads the files of a folder that have changed since it last did. One thread at a time.

    Args:
        store: where the trial's checkpoints are kept.
        trial: whose files they are.
        folder: what to upload; need not exist yet.
        into: where below the trial's folder in the storage.
        scratch: a folder for copies, on a disk that has room for one file.
    """

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
        """Upload what is new or has changed; how many files that was.

        Raises:
            StorageError: the storage failed, or the folder cannot be read. What was uploaded
                until then is not uploaded again.
        """
        with Explainer(str(self._folder)).explaining("read the files to upload in"):
            changed = {
                path: stamp
                for path in _files_in(self._folder)
                if self._uploaded.get(path) != (stamp := _stamp(path))
            }
        for path, stamp in changed.items():
            self._upload(path)
            self._uploaded[path] = stamp
        return len(changed)

    def _upload(self, path: Path) -> None:
        # A copy: the trial may be writing, and what is uploaded must be one state of the file.
        inner = path.relative_to(self._folder).as_posix()
        key = layout.run_file_key(self._trial, f"{self._into}/{inner}")
        with Explainer(str(self._scratch)).explaining("copy the files to upload into"):
            self._scratch.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._scratch, prefix="run-files-") as folder:
                copy = Path(shutil.copyfile(path, Path(folder) / path.name))
                self._store.storage.upload(copy, key, StopSignal())


def _files_in(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        if layout.is_file_path(path.relative_to(folder).as_posix()):
            yield path
        else:
            _logger.warning("not uploaded: %r is no name that a storage can keep", str(path))


def _stamp(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns
