"""A rank's state besides models and optimizers: random numbers, callbacks, data position.

Another number of ranks, or another sharding, restores it by a `RankRemap`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trial_core.checkpoint.manifest import Topology
from trial_core.checkpoint.resume_point import Restore
from trial_core.errors import CheckpointDamaged, CheckpointError
from trial_core.rank.collectives.accelerator import accelerator_rng_state, restore_accelerator_rng
from trial_core.rank.state_files.safe_load import Reader
from trial_core.rank.state_files.safe_save import readable
from trial_core.rank.trial.callback import PyTorchCallback
from trial_core.rank.trial.seeding import derive_seed, seed_globals
from trial_core.rank.trial.trial_adapter import TrialAdapter

logger = logging.getLogger(__name__)

STATE_FOLDER = "trialflow"


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, numpy, and torch on all devices."""
    seed_globals(seed)
    torch.manual_seed(seed)


def capture_rng() -> dict[str, Any]:
    """The state of every generator that training draws from, as plain data and tensors."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        # As a list: an array would need numpy's pickling, which torch refuses to load by default.
        "numpy": (str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), gauss),
        "torch": torch.get_rng_state(),
    }
    return {**state, **accelerator_rng_state()}


def restore_rng(state: Mapping[str, Any]) -> None:
    """Restore every generator to a state from `capture_rng`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    restore_accelerator_rng(state)


def rank_state(
    batches_trained: int, adapter: TrialAdapter, training_data: Mapping[str, Any] | None
) -> dict[str, Any]:
    """This rank's state: the dictionary that `on_checkpoint_save_start` gets."""
    return {
        "batches_trained": batches_trained,
        "training_data": training_data,
        "rng": capture_rng(),
        "callbacks": {name: each.state_dict() for name, each in adapter.callbacks.items()},
    }


def write_rank_state(folder: Path, rank: int, state: Mapping[str, Any], reader: Reader) -> None:
    """Write `state` to this rank's file below a checkpoint's `folder`.

    Raises TrialError if callbacks or loaders have a state that `reader` would not read.
    """
    path = _state_path(folder, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(readable(dict(state), reader), path)


def has_rank_state(folder: Path, rank: int) -> bool:
    return _state_path(folder, rank).is_file()


def read_rank_state(folder: Path, rank: int, reader: Reader) -> dict[str, Any]:
    """Read what `write_rank_state` wrote.

    Raises CheckpointDamaged if there is no state of this rank, and CheckpointError if it holds
    objects that only a trusted checkpoint may hold.
    """
    path = _state_path(folder, rank)
    if not has_rank_state(folder, rank):
        raise CheckpointDamaged(
            f"the checkpoint has no {path.relative_to(folder)}: was it saved with fewer ranks? "
            "Resume with the slots_per_trial that it was saved with"
        )
    state: dict[str, Any] = reader.load(path)
    return state


@dataclass(frozen=True)
class RankRemap:
    """The change of topology between a checkpoint and the ranks that restore it, and the `seed` of
    this rank's random generators, where their states cannot be restored."""

    saved: Topology
    now: Topology
    seed: int

    @classmethod
    def of(
        cls, saved: Topology | None, adapter: TrialAdapter, seed: int, batches_trained: int
    ) -> RankRemap | None:
        """The remap from `saved` (None without a restore) to the adapter's topology; None if it is
        the same. `seed` is the experiment's."""
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
    global. Random generators are seeded again. Raises CheckpointDamaged if there is no state of
    rank 0, and CheckpointError if the training loader's own state cannot be resharded.
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


def restore_callbacks(state: Mapping[str, Any], callbacks: Mapping[str, PyTorchCallback]) -> None:
    """Give every callback the state that was saved under its name, if any."""
    saved = state.get("callbacks") or {}  # on_checkpoint_load_start may have removed it
    for name, callback in callbacks.items():
        if name in saved:
            callback.load_state_dict(saved[name])
        elif type(callback).load_state_dict is not PyTorchCallback.load_state_dict:
            logger.warning("the checkpoint has no state of a callback called %r", name)


def _state_path(folder: Path, rank: int) -> Path:
    return folder / STATE_FOLDER / f"rank-{rank:05d}.pt"
