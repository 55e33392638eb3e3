"""A rank's part of a checkpoint: its state is staged, and restored from fetched files.

Staging blocks training. The trial saves into this rank's staging folder, where DeepSpeed's shards
are memory files, so staging costs one copy. `CheckpointFiles` uploads it later, during training.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import torch

from trial_core.checkpoint.resume_point import Restore
from trial_core.common.text_format import plural
from trial_core.config.sections import CheckpointingConfig
from trial_core.errors import CheckpointError
from trial_core.messages import RestoredSettings
from trial_core.processes.machine.memory_files import GIB, MemoryFiles, free_bytes
from trial_core.processes.slots.kept_memory import drop_kept
from trial_core.rank.checkpoint_files import CheckpointFiles
from trial_core.rank.collectives.accelerator import has_accelerator
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.data.sample_lists import SampleLists, differing_checkpoint
from trial_core.rank.first_checkpoint import load_back
from trial_core.rank.rank_state import (
    STATE_FOLDER,
    RankRemap,
    rank_state,
    read_rank_state,
    read_remapped_state,
    restore_callbacks,
    write_rank_state,
)
from trial_core.rank.state_files.built_settings import (
    UNCHANGED,
    BuiltSettings,
    changes_of_data,
    read_settings,
)
from trial_core.rank.state_files.late_copies import LateCopies, finish_copies, why_not_late
from trial_core.rank.state_files.safe_load import Reader
from trial_core.rank.state_files.storage_bytes import copy_by_threads
from trial_core.rank.trial.optimizer_modes import with_modes
from trial_core.rank.trial.trial_adapter import TrialAdapter

logger = logging.getLogger(__name__)


class Snapshots:
    """Stages the trial's state on this rank, and restores it.

    Attributes:
        built: the settings of its optimizers and the like; None if ranks have different ones.
        data_settings, sample_lists: of its training data, once the loaders are built.
    """

    def __init__(
        self,
        adapter: TrialAdapter,
        files: CheckpointFiles,
        distributed: DistributedContext,
        settings: CheckpointingConfig,
    ) -> None:
        self._adapter = adapter
        self._files = files
        self._distributed = distributed
        self._settings = settings
        self.built: BuiltSettings | None = None
        self.data_settings: dict[str, Any] = {}
        self.sample_lists: SampleLists = {}
        self._verifies = settings.verify_first is not False
        self._reader = Reader(settings.trusted, adapter.checkpoint_classes)
        self._memory: MemoryFiles | None = None
        self._late = LateCopies()
        self.require_complete = self._late.require_complete
        self._is_rehearsed = self._has_told = False
        files.complete = self.require_complete

    def rehearse(self) -> None:
        """Allocate memory for snapshots, before the first one. Collective: every rank calls this.

        Pinning memory and the first use of each page take seconds. A first snapshot after a stop
        request may not have them before the process is killed. To learn how much memory a snapshot
        needs, one is written. It is thrown away, and its memory is kept.
        """
        adapter = self._adapter
        if self._is_rehearsed or not adapter.rehearses_save:
            return
        self._is_rehearsed = True
        folder, memory = self._files.staging("rehearsal"), self._memory_files()
        folder.mkdir(parents=True, exist_ok=True)
        memory.begin(is_rehearsal=True)
        adapter.save(folder, memory, self._reader, adapter.hook_state())
        memory.end()
        shutil.rmtree(folder)
        with contextlib.suppress(OSError):  # it still holds other ranks' folders
            folder.parent.rmdir()

    def stage(
        self, uuid: str, batches_trained: int, training_data: Mapping[str, Any] | None
    ) -> Path:
        """Write this rank's shards and state. Collective: every rank calls this.

        Raises CheckpointUnrestorable if the first checkpoint that these ranks save cannot be
        restored. Not checked if they have restored one.
        """
        adapter, folder, memory = self._adapter, self._files.staging(uuid), self._memory_files()
        self._late.begin_save()
        folder.mkdir(parents=True, exist_ok=True)
        of_adapter = adapter.hook_state()
        state = {**of_adapter, **rank_state(batches_trained, adapter, training_data)}
        for callback in adapter.callbacks.values():
            callback.on_checkpoint_save_start(state)
        self._files.forget_memory()
        memory.begin()
        with self._copied_late(memory):
            adapter.save(folder, memory, self._reader, _taken_out(state, of_adapter))
        memory.end()
        write_rank_state(folder, self._distributed.get_rank(), state, self._reader)
        if self.built is not None and self._distributed.get_rank() == 0:
            self.built.write(folder / STATE_FOLDER, self.data_settings, self.sample_lists)
        if self._verifies:
            load_back(adapter, self._distributed, self._reader, folder, self._settings)
            self._verifies = False  # the others are saved and loaded in the same way
        return folder

    @property
    def waited_seconds(self) -> float:
        """How long training has waited for late copies in all."""
        return self._late.waited_seconds

    def close(self) -> None:
        finish_copies()
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def read_state(
        self, uuid: str | None, restore: Restore, remap: RankRemap | None = None
    ) -> dict[str, Any] | None:
        """This rank's state in a fetched checkpoint; None if only weights or nothing is restored.

        Raises CheckpointDamaged if the checkpoint has no state of this rank.
        """
        if uuid is None or restore == "weights":
            return None
        folder, rank = self._files.restored(uuid), self._distributed.get_rank()
        if restore == "state" and not (folder / STATE_FOLDER).is_dir():
            return {}  # another program has written the checkpoint
        if remap is None:
            return read_rank_state(folder, rank, self._reader)
        return read_remapped_state(folder, rank, self._reader, remap, restore)

    def batch_samples(self, uuid: str) -> int | None:
        """Samples of a batch when a fetched checkpoint was saved; None if they are not known."""
        saved = read_settings(self._files.restored(uuid) / STATE_FOLDER)
        return None if saved is None else saved.batch_samples

    def restore(
        self,
        uuid: str,
        state: dict[str, Any] | None,
        remap: RankRemap | None = None,
        keep: Collection[str] = (),
        continues: bool = True,
        compares: bool = True,
    ) -> RestoredSettings:
        """Load from fetched files, after all ranks have fetched. Collective: every rank calls this.

        Returns the settings that were built otherwise for the checkpoint.

        Args:
            state: the result of `read_state`, for the callbacks; None loads weights alone.
            keep: see `BuiltSettings.apply`.
            continues: True if training continues at the checkpoint's place in the data.
            compares: False if no person has changed anything; the checkpoint's settings stay.
        """
        adapter, folder = self._adapter, self._files.restored(uuid)
        if state is None:
            adapter.load_weights(folder, self._reader)
            return RestoredSettings()
        built, saved = self.built, read_settings(folder / STATE_FOLDER)
        told = RestoredSettings(is_known=not compares)

        def check(require: Callable[..., None], *arguments: Any) -> None:
            nonlocal built, told
            try:
                if saved is not None and built is not None:
                    require(built, saved, *arguments)
            except CheckpointError as error:
                if compares:
                    raise
                # The trial may choose the class by its machine.
                built, told = None, RestoredSettings(not_kept=[str(error)])

        check(BuiltSettings.require_same_types)
        read = adapter.read_hook_state(folder, self._reader)
        state.update(read)
        counts = _counts(adapter.entries_of_parts, state)
        for callback in adapter.callbacks.values():
            callback.on_checkpoint_load_start(state)
        of_adapter = _taken_out(state, read)
        left = _counts(adapter.entries_of_parts, of_adapter)
        check(BuiltSettings.require_same_counts, [x for x in left if left[x] != counts[x]])
        adapter.load(folder, self._reader, of_adapter, reshape=remap is not None)
        self._verifies = False
        if saved is not None and built is not None:
            told = built.apply(saved, keep, "" if compares else UNCHANGED)
        if saved is not None and continues:
            of_data = changes_of_data(saved, self.data_settings)
            told = msgspec.structs.replace(told, new=told.new + of_data)
        restore_callbacks(state, adapter.callbacks)  # what a callback sets counts
        return told

    def data_warnings(self, uuid: str, compares: bool, remap: RankRemap | None) -> Iterator[str]:
        """Warnings if a fetched checkpoint was saved with other training data, or perhaps with
        batches of other sizes. What `restore` compares is left out."""
        saved, now = read_settings(self._files.restored(uuid) / STATE_FOLDER), self.data_settings
        of_data = {} if saved is None else saved.data
        is_told = compares and of_data.get("samples") != now.get("samples")
        if saved is not None and not is_told:
            differing = differing_checkpoint(saved.sample_lists, self.sample_lists)
            yield from filter(None, [differing])
        if remap is None or remap.keeps_data_shards or not self._adapter.needs_data:
            return
        if "batch size" in of_data and "batch size" in now:
            return  # `restore` compares them
        if remap.saved.batch_samples and remap.now.batch_samples:
            return  # they are equal, or the driver would have refused the checkpoint
        then, ranks = remap.saved.data_parallel_size, remap.now.data_parallel_size
        yield (
            f"the place in the training data was counted on {plural(then, 'data-parallel rank')}, "
            f"and the run now has {ranks}: it is right if a batch of all ranks still has as many "
            "samples, which the loader does not tell. If each rank takes as many as before, "
            f"samples of this epoch are left out or come twice: resume on {plural(then, 'rank')}, "
            "or divide the size of a batch by the number of ranks (get_per_slot_batch_size)"
        )

    def _copied_late(self, memory: MemoryFiles) -> AbstractContextManager[None]:
        """Inside the block, what a step changes is copied while training continues, if it may be
        and the snapshot is not loaded back at once."""
        adapter = self._adapter
        if self._settings.snapshot == "eager" or self._verifies:
            return contextlib.nullcontext()
        if self._settings.snapshot is None and has_accelerator():
            why = "the ranks compute on accelerators, and checkpointing.snapshot is not set to lazy"
        elif self._files.store.is_process_local:
            why = "the storage is in the memory of the driver, which reads the files at once"
        elif not adapter.saves_plainly:
            why = "the trial overrides save, and may read the files"
        else:
            why = self._late.why_not
            why = why or why_not_late(adapter.optimizers, with_modes(adapter.optimizers))
        told = why or self._late.why_unproven
        if told and not self._has_told and self._distributed.get_rank() == 0:
            logger.info("snapshots are copied before training continues: %s", told)
        self._has_told = self._has_told or bool(told)
        if why:
            return contextlib.nullcontext()
        return self._late.collected(memory, adapter.optimizers, adapter.modules)

    def _memory_files(self) -> MemoryFiles:
        # Not created before training: only then is known how much memory it leaves free.
        if self._memory is None:
            drop_kept()  # of earlier ranks: all ranks here have restored it
            copy = copy_by_threads if torch.get_num_threads() > 1 else None
            if (gib := self._settings.memory_gib_per_rank) is not None:
                self._memory = MemoryFiles(int(gib * GIB), copy=copy)
            else:
                # Measured once, before any rank writes. The ranks share the memory above it: rank 0
                # usually needs more, because it saves the model.
                reserve = int(self._distributed.broadcast_local(free_bytes() // 2))
                self._memory = MemoryFiles(None, reserve, copy)
        return self._memory


def _counts(names: Mapping[str, str], state: Mapping[str, Any]) -> dict[str, int | None]:
    """The lengths of the named entries of `state`; None for one that it lacks."""
    found = {kind: state.get(name) for kind, name in names.items()}
    return {kind: None if each is None else len(each) for kind, each in found.items()}


def _taken_out(state: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Take the named entries out of `state`, except entries that a hook has removed."""
    return {name: state.pop(name) for name in names if name in state}
