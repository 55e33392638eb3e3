"""A rank's part of a checkpoint: stage it, persist it, fetch and restore it.

Staging blocks training. The trial saves into this rank's staging folder, where DeepSpeed's shards
are memory files, so staging costs one copy. Persisting does not block training: another process
uploads the folder. The folder is kept until the driver has committed the manifest.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trial_core.checkpoint.manifest import FileEntry
from trial_core.checkpoint.resume_point import Restore
from trial_core.checkpoint.store import CheckpointStore
from trial_core.controller.rank_state import (
    rank_state,
    read_rank_state,
    restore_callbacks,
    write_rank_state,
)
from trial_core.controller.reshard_rank_state import RankRemap, read_remapped_state
from trial_core.controller.safe_load import Reader
from trial_core.controller.trial_engine import TrialEngine
from trial_core.distributed import DistributedContext
from trial_core.run.run_dirs import KEPT
from trial_core.run.timeouts import TRANSFER_STALL_SECONDS
from trial_core.transfer.fetch import fetch_files
from trial_core.transfer.memory_files import GIB, MemoryFiles, default_limit_bytes, is_memory_file
from trial_core.transfer.persister import Persister
from trial_core.transfer.staging import staged_files
from trial_core.transfer.upload import upload_files


class Snapshots:
    """This rank's staged and fetched checkpoints, below the run's folder on this machine.

    Args:
        settings: the experiment's `checkpointing` section, as plain data.
    """

    def __init__(
        self,
        engine: TrialEngine,
        run_dir: Path,
        store: CheckpointStore,
        distributed: DistributedContext,
        settings: Mapping[str, Any],
    ) -> None:
        self._engine = engine
        self._run_dir = run_dir
        self._store = store
        self._distributed = distributed
        self._memory_gib = settings.get("memory_gib_per_rank")
        self._reader = Reader(bool(settings.get("trusted")), engine.checkpoint_classes)
        self._memory: MemoryFiles | None = None
        self._persister = Persister(settings.get("stall_timeout_seconds", TRANSFER_STALL_SECONDS))

    def staging(self, uuid: str) -> Path:
        """This rank's staging folder for checkpoint `uuid`."""
        return self._run_dir / "staging" / uuid / f"rank-{self._distributed.get_rank()}"

    def restored(self, uuid: str) -> Path:
        """The folder for fetched files of `uuid`, which this machine's ranks share."""
        return self._run_dir / "restored" / uuid

    def stage(
        self, uuid: str, batches_trained: int, training_data: Mapping[str, Any] | None
    ) -> Path:
        """Write this rank's shards and state. Collective: every rank calls this."""
        engine, folder, memory = self._engine, self.staging(uuid), self._memory_files()
        folder.mkdir(parents=True, exist_ok=True)
        of_engine = engine.hook_state()
        state = {**of_engine, **rank_state(batches_trained, engine, training_data)}
        for callback in engine.callbacks.values():
            callback.on_checkpoint_save_start(state)
        memory.begin()
        engine.save(folder, memory, self._reader, _taken_out(state, of_engine))
        memory.end()
        write_rank_state(folder, self._distributed.get_rank(), state, self._reader)
        return folder

    def persist(self, uuid: str) -> list[FileEntry]:
        """Upload what this rank has staged. For the I/O lane; not collective."""
        folder, rank = self.staging(uuid), self._distributed.get_rank()
        if self._store.is_process_local:
            return upload_files(self._store, uuid, folder, rank)
        return self._persister.upload(self._store.spec, uuid, rank, staged_files(folder, rank))

    def release(self, uuid: str) -> None:
        """Delete what was staged for `uuid`, once it is committed or given up, and fetched before.

        Files on disk are kept until the next release, so that a restart need not fetch them.
        """
        self._persister.forget(uuid)
        staged, kept = self.staging(uuid), self._run_dir / KEPT
        own = f"rank-{self._distributed.get_rank()}"
        is_first_here = self._distributed.get_local_rank() == 0
        for folder in kept.glob("*"):
            if folder.name != uuid:  # the first rank also deletes files of ranks that are gone
                shutil.rmtree(folder if is_first_here else folder / own, ignore_errors=True)
        for path in staged.rglob("*"):
            if is_memory_file(path):
                path.unlink()
        if staged.is_dir():
            (kept / uuid).mkdir(parents=True, exist_ok=True)
            shutil.move(staged, kept / uuid / own)
        for emptied in (*kept.glob("*"), staged.parent):
            with contextlib.suppress(OSError):  # it still holds other ranks' folders
                emptied.rmdir()
        if is_first_here:
            shutil.rmtree(self._run_dir / "restored", ignore_errors=True)

    def close(self) -> None:
        """End the persister process and free the memory files."""
        self._persister.close()
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def fetch(self, uuid: str, files: list[FileEntry]) -> None:
        """Fetch and verify this rank's share of `files`. For the I/O lane; not collective.

        The machine's n ranks share one folder, so each rank fetches every n-th file.
        """
        ordered = sorted(files, key=lambda entry: (-entry.size_bytes, entry.path))
        share = ordered[self._distributed.get_local_rank() :: self._distributed.local_size]
        kept = sorted((self._run_dir / KEPT / uuid).glob("rank-*"))
        if self._store.is_process_local:
            fetch_files(self._store, uuid, share, self.restored(uuid), local=kept)
        else:
            self._persister.fetch(self._store.spec, uuid, share, self.restored(uuid), kept)

    def read_state(
        self, uuid: str | None, restore: Restore, remap: RankRemap | None = None
    ) -> dict[str, Any] | None:
        """This rank's state in a fetched checkpoint; None if only weights or nothing is restored.

        Raises:
            CheckpointDamaged: the checkpoint has no state of this rank.
        """
        if uuid is None or restore == "weights":
            return None
        folder, rank = self.restored(uuid), self._distributed.get_rank()
        if remap is None:
            return read_rank_state(folder, rank, self._reader)
        return read_remapped_state(folder, rank, self._reader, remap, self._engine, restore)

    def restore(
        self, uuid: str, state: dict[str, Any] | None, remap: RankRemap | None = None
    ) -> None:
        """Load from fetched files. Collective: every rank calls this, after all have fetched.

        Args:
            state: the result of `read_state`, for the callbacks; None loads weights alone.
        """
        engine, folder = self._engine, self.restored(uuid)
        if state is None:
            engine.load_weights(folder, self._reader)
            return
        of_engine = engine.read_hook_state(folder, self._reader)
        state.update(of_engine)
        for callback in engine.callbacks.values():
            callback.on_checkpoint_load_start(state)
        of_engine = _taken_out(state, of_engine)
        engine.load(folder, self._reader, of_engine, reshape=remap is not None)
        restore_callbacks(state, engine.callbacks)

    def _memory_files(self) -> MemoryFiles:
        # Created by the first snapshot: only then is known how much memory training leaves free.
        if self._memory is None:
            limit = default_limit_bytes(self._distributed.local_size)
            given = self._memory_gib
            self._memory = MemoryFiles(limit if given is None else int(given * GIB))
        return self._memory


def _taken_out(state: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Those entries of `state`, without those that a hook has removed. `state` loses them."""
    return {name: state.pop(name) for name in names if name in state}
