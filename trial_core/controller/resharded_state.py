"""What a rank has of its own, where other ranks than those that saved it go on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trial_core.checkpoint.manifest import Topology
from trial_core.checkpoint.resume_point import Restore
from trial_core.controller.rank_state import (
    capture_rng,
    has_rank_state,
    read_rank_state,
    restore_rng,
    seed_everything,
)
from trial_core.controller.safe_load import Reader
from trial_core.controller.trial_engine import TrialEngine
from trial_core.errors import CheckpointError
from trial_core.pytorch.seeding import derive_seed


@dataclass(frozen=True)
class RankRemap:
    """A checkpoint's way to other ranks, or to another ZeRO stage.

    Attributes:
        saved: how its ranks divided the work.
        now: how the present ones do.
        seed: for this rank's random generators, where they cannot go on.
    """

    saved: Topology
    now: Topology
    seed: int

    @classmethod
    def of(
        cls, saved: Topology | None, engine: TrialEngine, seed: int, batches_trained: int
    ) -> RankRemap | None:
        """The way that there is; None if every rank's files can be used as they are.

        Args:
            saved: None: nothing is restored.
            seed: the experiment's.
        """
        now = engine.topology()
        if saved is None or saved.spreads_like(now):
            return None
        own = derive_seed(seed, "redistributed", engine.data_parallel_rank, batches_trained)
        return cls(saved, now, own)

    @property
    def keeps_shares(self) -> bool:
        """Whether the data is divided among as many ranks as it was."""
        return self.saved.data_parallel_size == self.now.data_parallel_size

    def __str__(self) -> str:
        said = (
            f"the checkpoint of {self.saved.world_size} ranks (ZeRO stage "
            f"{self.saved.zero_stage}) is shared out over {self.now.world_size} (ZeRO stage "
            f"{self.now.zero_stage})"
        )
        if self.keeps_shares:
            return said
        return (
            f"{said}; random generators begin anew, seeded by the experiment's seed, the rank and "
            "the batch, so what is random in training differs from a run on as many ranks as before"
        )


def read_redistributed(
    folder: Path, rank: int, reader: Reader, move: RankRemap, restore: Restore = "everything"
) -> dict[str, Any]:
    """The state that a rank goes on with, as `read_rank_state` gives it.

    Where the data is divided among as many ranks as it was, each has its own. Otherwise callbacks
    have that of the same rank, or where there was none that of the first; the place in the data is
    one for all; and random generators begin anew.

    Args:
        restore: how much of it is; a new trial does not take over its place in the data.

    Raises:
        CheckpointDamaged: the checkpoint has no state of rank 0.
        CheckpointError: the training loader's own state cannot be shared out.
    """
    first = read_rank_state(folder, 0, reader)
    own = read_rank_state(folder, rank, reader) if has_rank_state(folder, rank) else first
    if move.keeps_shares:
        return own
    data = first.get("training_data")
    if restore == "everything" and data is not None and data.get("loader") is not None:
        raise CheckpointError(
            "the checkpoint holds the state of the trial's own training loader on each of "
            f"{move.saved.data_parallel_size} data-parallel ranks, which cannot be shared out over "
            f"{move.now.data_parallel_size}; resume with {move.saved.world_size} slots. To be free "
            "of that, train with a trial_core.pytorch.DataLoader"
        )
    return {**own, "training_data": data, "rng": seeded_rng(move.seed)}


def seeded_rng(seed: int) -> dict[str, Any]:
    """The state of generators that were seeded; those of this process stay as they are."""
    before = capture_rng()
    seed_everything(seed)
    seeded = capture_rng()
    restore_rng(before)
    return seeded
