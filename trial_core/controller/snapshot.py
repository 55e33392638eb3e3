"""A rank's half of a checkpoint: stage it, persist it, bring it back.

Staging blocks training: the trial writes its shards to a folder of this rank's on local disk.
Persisting does not: the I/O lane uploads that folder. The folder is kept until the driver has
committed the manifest.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trial_core.checkpoint.manifest import FileEntry
from trial_core.checkpoint.store import CheckpointStore
from trial_core.checkpoint.transfer import fetch_files, upload_files
from trial_core.controller.engine import TrialEngine
from trial_core.controller.state import (
    rank_state,
    read_rank_state,
    restore_callbacks,
    write_rank_state,
)
from trial_core.distributed import DistributedContext
from trial_core.start import Restore


class Snapshots:
    """This rank's staged and restored checkpoints, below the run's folder on this machine."""

    def __init__(self, run_dir: Path, store: CheckpointStore, distributed: DistributedContext):
        self._run_dir = run_dir
        self._store = store
        self._distributed = distributed

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
        folder = self.staging(uuid)
        folder.mkdir(parents=True, exist_ok=True)
        state = rank_state(batches_trained, engine.callbacks, training_data)
        for callback in engine.callbacks.values():
            callback.on_checkpoint_save_start(state)
        engine.save(folder)
        write_rank_state(folder, self._distributed.get_rank(), state)
        return folder

    def persist(self, uuid: str) -> list[FileEntry]:
        """Upload what this rank has staged. Runs in the I/O lane; no collective."""
        return upload_files(self._store, uuid, self.staging(uuid), self._distributed.get_rank())

    def release(self, uuid: str) -> None:
        """Drop what this rank has staged for `uuid`, and what was fetched to resume from."""
        shutil.rmtree(self.staging(uuid), ignore_errors=True)
        if self._distributed.get_local_rank() == 0:
            shutil.rmtree(self._run_dir / "restored", ignore_errors=True)

    def fetch(self, uuid: str, files: list[FileEntry]) -> None:
        """Bring this rank's share of a checkpoint here, verified. Runs in the I/O lane.

        The machine's ranks share one folder, so each fetches every n-th file of it.
        """
        every = self._distributed.local_size
        share = sorted(files, key=lambda entry: (-entry.size_bytes, entry.path))
        own = share[self._distributed.get_local_rank() :: every]
        fetch_files(self._store, uuid, own, self.restored(uuid))

    def read_state(self, uuid: str | None, restore: Restore) -> dict[str, Any] | None:
        """This rank's own state in a fetched checkpoint; None where no more is restored than
        weights, or nothing at all.

        Raises:
            CheckpointDamaged: the checkpoint has no state of this rank.
        """
        if uuid is None or restore == "weights":
            return None
        return read_rank_state(self.restored(uuid), self._distributed.get_rank())

    def restore(self, uuid: str, engine: TrialEngine, state: dict[str, Any] | None) -> None:
        """Load from fetched files. Collective: every rank calls this, after all have fetched.

        Args:
            state: what `read_state` gave, for the callbacks; None loads weights alone.
        """
        folder = self.restored(uuid)
        if state is None:
            engine.load_weights(folder)
            return
        for callback in engine.callbacks.values():
            callback.on_checkpoint_load_start(state)
        engine.load(folder)
        restore_callbacks(state, engine.callbacks)
