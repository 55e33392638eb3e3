"""Uploads a rank's TensorBoard files and profiler traces."""

from __future__ import annotations

import logging
from pathlib import Path

from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.run_files import RunFiles, rank_folder
from trial_core.errors import StorageError
from trial_core.messages import RunFilesStored
from trial_core.rank.trial.context import RunInfo
from trial_core.rank.trial.tensorboard import TensorBoard

logger = logging.getLogger(__name__)


def tensorboard_in(run_dir: Path, rank: int) -> TensorBoard:
    """A rank's TensorBoard files, below the run's folder on this machine."""
    return TensorBoard(run_dir / rank_folder(rank))


class RunFileUpload:
    """Uploads this rank's event files and traces; `run_dir` gets temporary copies."""

    def __init__(self, info: RunInfo, store: CheckpointStore, run_dir: Path) -> None:
        self._tensorboard = info.tensorboard
        self._store = store
        self._trial = info.trial
        self._scratch = run_dir / "staging"
        self._files: RunFiles | None = None

    def upload(self) -> RunFilesStored:
        """Upload the files that have changed, if uploads are switched on. Not collective.

        For any thread, one call at a time. A storage failure is a warning: the next upload
        includes the same files.
        """
        # Only the driver sees a process-local storage, so the driver uploads there.
        if not self._tensorboard.has_files_to_upload or self._store.is_process_local:
            return RunFilesStored(files=0)
        if self._files is None:
            folder, into = self._tensorboard.folder(), rank_folder(self._tensorboard.rank)
            self._files = RunFiles(self._store, self._trial, folder, into, self._scratch)
        self._tensorboard.flush()
        try:
            return RunFilesStored(files=self._files.upload_changed())
        except StorageError as error:
            logger.warning("files for TensorBoard are not uploaded: %s", error)
            return RunFilesStored(files=0, problem=str(error))
