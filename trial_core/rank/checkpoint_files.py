"""The files on a rank's machine: staged and fetched checkpoints, and those for TensorBoard."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trial_core.checkpoint.manifest import FileEntry
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer.fetch import fetch_files, take_local
from trial_core.checkpoint.transfer.persister import Persister
from trial_core.checkpoint.transfer.run_files import RunFiles, rank_folder
from trial_core.checkpoint.transfer.upload import staged_files, upload_files
from trial_core.errors import CheckpointDamaged, CheckpointError, StorageError, WeightsChanged
from trial_core.messages import Fetched, Persisted, RunFilesStored
from trial_core.processes.machine.memory_files import take_memory_links
from trial_core.processes.machine.run_dirs import KEPT
from trial_core.processes.slots.kept_memory import keep_in_memory
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.trial.context import RunInfo
from trial_core.rank.trial.tensorboard import TensorBoard

logger = logging.getLogger(__name__)

RESTORED = "restored"
"""The folder of fetched checkpoints, in the run's folder."""


def tensorboard_in(run_dir: Path, rank: int) -> TensorBoard:
    """A rank's TensorBoard files, below the run's folder on this machine."""
    return TensorBoard(run_dir / rank_folder(rank))


class CheckpointFiles:
    """This rank's files below the run's folder on this machine, to and from the storage.

    `complete` waits until what is staged is complete. Raises CheckpointRefused if it cannot be.
    """

    def __init__(
        self,
        run_dir: Path,
        store: CheckpointStore,
        distributed: DistributedContext,
        info: RunInfo,
    ) -> None:
        self._run_dir = run_dir
        self.store = store
        self._distributed = distributed
        self._is_moving = threading.Lock()
        self._persister = Persister(info.checkpointing.stall_timeout_seconds)
        self._info = info
        self._run_files: RunFiles | None = None
        self.complete: Callable[[], None] = lambda: None

    def staging(self, uuid: str) -> Path:
        """This rank's staging folder for checkpoint `uuid`."""
        return self._run_dir / "staging" / uuid / f"rank-{self._distributed.get_rank()}"

    def restored(self, uuid: str) -> Path:
        """The folder for fetched files of `uuid`, which this machine's ranks share."""
        return self._run_dir / RESTORED / uuid

    def persist(self, uuid: str, shared: Sequence[FileEntry] = ()) -> list[FileEntry]:
        """Upload the files that this rank has staged. For any thread; not collective."""
        folder, rank = self.staging(uuid), self._distributed.get_rank()
        self.complete()
        if self.store.is_process_local:
            return upload_files(self.store, uuid, folder, rank, shared=shared)
        with self._is_moving:
            files = staged_files(folder, rank)
            return self._persister.upload(self.store.spec, uuid, rank, files, shared)

    def release(self, uuid: str) -> None:
        """Release the files staged for `uuid`, once it is committed or given up.

        They are kept until the next release, so that a restart need not fetch them: on disk, or by
        the fork server for memory files.
        """
        self._persister.forget(uuid)
        staged, kept = self.staging(uuid), self._run_dir / KEPT
        own = f"rank-{self._distributed.get_rank()}"
        is_first_here = self._distributed.get_local_rank() == 0
        for folder in kept.glob("*"):
            if folder.name != uuid:  # the first rank also deletes files of ranks that are gone
                shutil.rmtree(folder if is_first_here else folder / own, ignore_errors=True)
        if staged.is_dir():
            links = take_memory_links(staged)
            (kept / uuid).mkdir(parents=True, exist_ok=True)
            shutil.move(staged, kept / uuid / own)
            if not self.store.is_process_local:  # else ranks do not read checkpoints themselves
                keep_in_memory(kept / uuid / own, links)
        for emptied in (*kept.glob("*"), staged.parent):
            with contextlib.suppress(OSError):  # it still holds other ranks' folders
                emptied.rmdir()

    def delete_fetched(self) -> None:
        """Delete the files fetched to this machine. For every rank; the first one deletes them."""
        if self._distributed.get_local_rank() == 0:
            shutil.rmtree(self._run_dir / RESTORED, ignore_errors=True)

    def forget_memory(self) -> None:
        """Forget this rank's memory files: they will hold another checkpoint's content."""
        for folder in (self._run_dir / KEPT).glob(f"*/rank-{self._distributed.get_rank()}"):
            take_memory_links(folder)

    def fetch(self, uuid: str, files: list[FileEntry]) -> None:
        """Fetch and verify this rank's share of `files`. For any thread; not collective.

        The machine's n ranks share one folder, so each rank fetches every n-th file.
        """
        ordered = sorted(files, key=lambda entry: (-entry.size_bytes, entry.path))
        share = ordered[self._distributed.get_local_rank() :: self._distributed.local_size]
        kept = sorted((self._run_dir / KEPT / uuid).glob("rank-*"))
        # In this process: the persister takes its time to start, and may not be needed.
        missing = take_local(uuid, share, self.restored(uuid), kept)
        if not missing:
            return
        if self.store.is_process_local:
            fetch_files(self.store, uuid, missing, self.restored(uuid))
            return
        with self._is_moving:
            self._persister.fetch(self.store.spec, uuid, missing, self.restored(uuid))

    def try_persist(self, uuid: str, shared: Sequence[FileEntry]) -> Persisted:
        """Like `persist`, with its error in the result: other ranks may be training, and the driver
        decides how to continue. If there is none, the files for TensorBoard follow."""
        began = time.monotonic()
        files: list[FileEntry] = []
        problem = mistake = None
        has_changed = False
        try:
            files = self.persist(uuid, shared)
        except StorageError as error:
            problem = str(error)
        except CheckpointError as error:
            mistake, has_changed = str(error), isinstance(error, WeightsChanged)
        seconds = time.monotonic() - began
        if problem is None and mistake is None:
            self.upload_run_files()
        return Persisted(
            files=files, seconds=seconds, problem=problem, mistake=mistake, has_changed=has_changed
        )

    def try_fetch(self, uuid: str, files: list[FileEntry]) -> Fetched:
        """Like `fetch`, with its error in the result."""
        try:
            self.fetch(uuid, files)
        except CheckpointDamaged as damage:
            # Not a failure of this rank: the driver may choose an older checkpoint.
            return Fetched(damage=str(damage))
        except StorageError as error:
            return Fetched(problem=str(error))
        return Fetched()

    def upload_run_files(self) -> RunFilesStored:
        """Upload the files for TensorBoard that have changed, if that is switched on.

        Not collective; for any thread, one call at a time. After a storage failure, which is a
        warning, the next upload includes the same files.
        """
        tensorboard = self._info.tensorboard
        # Only the driver sees a process-local storage, so the driver uploads there.
        if not tensorboard.has_files_to_upload or self.store.is_process_local:
            return RunFilesStored(files=0)
        if self._run_files is None:
            folder, into = tensorboard.folder(), rank_folder(tensorboard.rank)
            scratch = self._run_dir / "staging"
            self._run_files = RunFiles(self.store, self._info.trial, folder, into, scratch)
        tensorboard.flush()
        try:
            return RunFilesStored(files=self._run_files.upload_changed())
        except StorageError as error:
            logger.warning("files for TensorBoard are not uploaded: %s", error)
            return RunFilesStored(files=0, problem=str(error))

    def finish_run_files(self) -> RunFilesStored:
        """Stop the profiler, and upload the remaining files for TensorBoard."""
        self._info.tensorboard.finish()
        return self.upload_run_files()

    def close(self) -> None:
        self._persister.close()
