"""A rank's half of a checkpoint: stage it, persist it, bring it back.

Staging blocks training: the trial saves into a folder of this rank's, in which DeepSpeed's shards
are images in memory, so that it costs a copy. Persisting does not: another process uploads that
folder. It is kept until the driver has committed the manifest.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trial_core.checkpoint.manifest import FileEntry
from trial_core.checkpoint.resume_point import Restore
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config.checkpointing_section import STALL_TIMEOUT_SECONDS
from trial_core.controller.rank_state import (
    rank_state,
    read_rank_state,
    restore_callbacks,
    write_rank_state,
)
from trial_core.controller.resharded_state import RankRemap, read_redistributed
from trial_core.controller.safe_load import Reader
from trial_core.controller.trial_engine import TrialEngine
from trial_core.distributed import DistributedContext
from trial_core.run.run_dirs import KEPT
from trial_core.transfer.fetch import fetch_files
from trial_core.transfer.memory_files import GIB, MemoryFiles, default_limit_bytes, is_memory_file
from trial_core.transfer.persister import Persister
from trial_core.transfer.staging import staged_files
from trial_core.transfer.upload import upload_files


class Snapshots:
    """This rank's staged and restored checkpoints, below the run's folder on this machine.

    Args:
        settings: the experiment's `checkpointing`, as plain data.
    """

    def __init__(
        self,
        run_dir: Path,
        store: CheckpointStore,
        distributed: DistributedContext,
        settings: Mapping[str, Any],
    ) -> None:
        self._run_dir = run_dir
        self._store = store
        self._distributed = distributed
        self._memory_gib = settings.get("memory_gib_per_rank")
        self._reader = Reader(bool(settings.get("trusted")))
        self._images: MemoryFiles | None = None
        self._persister = Persister(settings.get("stall_timeout_seconds", STALL_TIMEOUT_SECONDS))

    def staging(self, uuid: str) -> Path:
        """Where this rank stages checkpoint `uuid`."""
        return self._run_dir / "staging" / uuid / f"rank-{self._distributed.get_rank()}"

    def restored(self, uuid: str) -> Path:
        """Where this machine's ranks keep the files of `uuid` that they have fetched."""
        return self._run_dir / "restored" / uuid

    def stage(
        self,
        uuid: str,
        engine: TrialEngine,
        batches_trained: int,
        training_data: Mapping[str, Any] | None,
    ) -> Path:
        """Write this rank's shards and state. Collective: every rank calls this."""
        folder, images = self.staging(uuid), self._the_images
        folder.mkdir(parents=True, exist_ok=True)
        state = rank_state(batches_trained, engine.callbacks, training_data)
        for callback in engine.callbacks.values():
            callback.on_checkpoint_save_start(state)
        images.begin()
        engine.save(folder, images)
        images.end()
        write_rank_state(folder, self._distributed.get_rank(), state)
        return folder

    def persist(self, uuid: str) -> list[FileEntry]:
        """Upload what this rank has staged. Runs in the I/O lane; no collective."""
        folder, rank = self.staging(uuid), self._distributed.get_rank()
        if self._store.is_process_local:
            return upload_files(self._store, uuid, folder, rank)
        return self._persister.upload(self._store.spec, uuid, rank, staged_files(folder, rank))

    def release(self, uuid: str) -> None:
        """`uuid` is committed, or given up: drop what was staged for it, and fetched before it.

        Files on disk are kept until the next one is: a restart need not fetch them.
        """
        self._persister.forget(uuid)
        staged, kept = self.staging(uuid), self._run_dir / KEPT
        own = f"rank-{self._distributed.get_rank()}"
        is_first_here = self._distributed.get_local_rank() == 0
        for folder in kept.glob("*"):
            if folder.name != uuid:  # the first rank takes what ranks have left that are no more
                shutil.rmtree(folder if is_first_here else folder / own, ignore_errors=True)
        for path in staged.rglob("*"):
            if is_memory_file(path):
                path.unlink()
        if staged.is_dir():
            (kept / uuid).mkdir(parents=True, exist_ok=True)
            shutil.move(staged, kept / uuid / own)
        for emptied in (*kept.glob("*"), staged.parent):
            with contextlib.suppress(OSError):  # other ranks' folders are still in it
                emptied.rmdir()
        if is_first_here:
            shutil.rmtree(self._run_dir / "restored", ignore_errors=True)

    def close(self) -> None:
        """End the process that moves files, and give the memory of snapshots back."""
        self._persister.close()
        if self._images is not None:
            self._images.close()
            self._images = None

    def fetch(self, uuid: str, files: list[FileEntry]) -> None:
        """Bring this rank's share of a checkpoint here, verified. Runs in the I/O lane.

        The machine's ranks share one folder, so each fetches every n-th file of it.
        """
        every = self._distributed.local_size
        share = sorted(files, key=lambda entry: (-entry.size_bytes, entry.path))
        own = share[self._distributed.get_local_rank() :: every]
        kept = sorted((self._run_dir / KEPT / uuid).glob("rank-*"))
        if self._store.is_process_local:
            fetch_files(self._store, uuid, own, self.restored(uuid), local=kept)
        else:
            self._persister.fetch(self._store.spec, uuid, own, self.restored(uuid), kept)

    def read_state(
        self, uuid: str | None, restore: Restore, move: RankRemap | None = None
    ) -> dict[str, Any] | None:
        """This rank's own state in a fetched checkpoint; None where no more is restored than
        weights, or nothing at all.

        Args:
            move: where other ranks have saved it.

        Raises:
            CheckpointDamaged: the checkpoint has no state of this rank.
        """
        if uuid is None or restore == "weights":
            return None
        folder, rank = self.restored(uuid), self._distributed.get_rank()
        if move is not None:
            return read_redistributed(folder, rank, self._reader, move, restore)
        return read_rank_state(folder, rank, self._reader)

    def restore(
        self,
        uuid: str,
        engine: TrialEngine,
        state: dict[str, Any] | None,
        move: RankRemap | None = None,
    ) -> None:
        """Load from fetched files. Collective: every rank calls this, after all have fetched.

        Args:
            state: what `read_state` gave, for the callbacks; None loads weights alone.
            move: where other ranks have saved them.
        """
        folder = self.restored(uuid)
        if state is None:
            engine.load_weights(folder, self._reader)
            return
        for callback in engine.callbacks.values():
            callback.on_checkpoint_load_start(state)
        engine.load(folder, self._reader, reshape=move is not None)
        restore_callbacks(state, engine.callbacks)

    @property
    def _the_images(self) -> MemoryFiles:
        # With the first snapshot: only then is known how much memory training leaves.
        if self._images is None:
            limit = default_limit_bytes(self._distributed.local_size)
            given = self._memory_gib
            self._images = MemoryFiles(limit if given is None else int(given * GIB))
        return self._images
