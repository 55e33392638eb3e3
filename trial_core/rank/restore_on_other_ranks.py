"""Restores a rank's state from a checkpoint of other ranks, or of another sharding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trial_core.checkpoint.manifest import Topology
from trial_core.checkpoint.resume_point import Restore
from trial_core.errors import CheckpointError
from trial_core.rank.rank_state import (
    capture_rng,
    has_rank_state,
    read_rank_state,
    restore_rng,
    seed_everything,
)
from trial_core.rank.state_files.safe_load import Reader
from trial_core.rank.trial.seeding import derive_seed
from trial_core.rank.trial.trial_adapter import TrialAdapter


@dataclass(frozen=True)
class RankRemap:
    """The change of topology between a checkpoint and the ranks that restore it.

    `seed` is for this rank's random generators, where their states cannot be restored.
    """

    saved: Topology
    now: Topology
    seed: int

    @classmethod
    def of(
        cls, saved: Topology | None, adapter: TrialAdapter, seed: int, batches_trained: int
    ) -> RankRemap | None:
        """The remap from `saved` to the topology of `adapter`; None if none is needed.

        `saved` is None if nothing is restored; `seed` is the experiment's.
        """
        now = adapter.topology()
        if saved is None or saved.spreads_like(now):
            return None
        rank_seed = derive_seed(seed, "redistributed", adapter.data_parallel_rank, batches_trained)
        return cls(saved, now, rank_seed)

    @property
    def keeps_data_shards(self) -> bool:
        """True if each rank continues with its own data and random numbers."""
        return (self.saved.data_parallel_size, self.saved.world_size) == (
            self.now.data_parallel_size,
            self.now.world_size,
        )

    def __str__(self) -> str:
        change = (
            f"the checkpoint of {self.saved.world_size} ranks ({self.saved.state_division}) is "
            f"resharded to {self.now.world_size} ({self.now.state_division})"
        )
        if self.keeps_data_shards:
            return change
        return (
            f"{change}; random generators are seeded again, from the experiment's seed, the rank "
            "and the batch, so random numbers differ from those of a run on the original ranks"
        )


def read_remapped_state(
    folder: Path, rank: int, reader: Reader, remap: RankRemap, restore: Restore = "everything"
) -> dict[str, Any]:
    """The state that a rank continues with, in the form of `read_rank_state`.

    If the numbers of ranks and of data-parallel ranks are unchanged, each rank gets its own state.
    Otherwise callbacks get the state of the rank with the same number, or of rank 0 if there is
    none. All ranks get one position in the data, and rank 0's state of a loader whose state is
    global. Random generators are seeded again.

    Raises:
        CheckpointDamaged: the checkpoint has no state of rank 0.
        CheckpointError: the training loader's own state cannot be resharded.
    """
    first = read_rank_state(folder, 0, reader)
    own = read_rank_state(folder, rank, reader) if has_rank_state(folder, rank) else first
    if remap.keeps_data_shards:
        return own
    data: Mapping[str, Any] = first.get("training_data") or {}
    is_own = data.get("loader") is not None and not data.get("loader_is_global")
    if restore == "everything" and is_own:
        raise CheckpointError(
            "the checkpoint holds the state of the trial's own training loader "
            f"({data['loader_type']}) on each of {remap.saved.data_parallel_size} data-parallel "
            f"ranks, which cannot be resharded to {remap.now.data_parallel_size}; resume with "
            f"{remap.saved.world_size} slots, or train with a trial_core.pytorch.DataLoader, which "
            "can be resharded. A loader whose state is the same on all ranks, and holds for any "
            "number of them, says so with state_is_global = True"
        )
    before = capture_rng()
    seed_everything(remap.seed)
    seeded = capture_rng()
    restore_rng(before)
    return {**own, "training_data": data or None, "rng": seeded}
