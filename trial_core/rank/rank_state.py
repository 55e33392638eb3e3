"""A rank's state besides models and optimizers: random numbers, callbacks, data position."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trial_core.errors import CheckpointDamaged
from trial_core.rank.collectives.accelerator import accelerator_rng_state, restore_accelerator_rng
from trial_core.rank.state_files.safe_load import Reader
from trial_core.rank.state_files.safe_save import readable
from trial_core.rank.trial.callback import PyTorchCallback
from trial_core.rank.trial.seeding import seed_globals
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

    Raises:
        TrialError: callbacks or loaders have a state that `reader` would not read.
    """
    path = _state_path(folder, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(readable(dict(state), reader), path)


def has_rank_state(folder: Path, rank: int) -> bool:
    return _state_path(folder, rank).is_file()


def read_rank_state(folder: Path, rank: int, reader: Reader) -> dict[str, Any]:
    """Read what `write_rank_state` wrote.

    Raises:
        CheckpointDamaged: the checkpoint has no state of this rank.
        CheckpointError: the state holds objects that only a trusted checkpoint may hold.
    """
    path = _state_path(folder, rank)
    if not has_rank_state(folder, rank):
        raise CheckpointDamaged(
            f"the checkpoint has no {path.relative_to(folder)}: was it saved with fewer ranks? "
            "Resume with the slots_per_trial that it was saved with"
        )
    state: dict[str, Any] = reader.load(path)
    return state


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
