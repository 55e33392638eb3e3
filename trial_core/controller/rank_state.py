"""What a rank must remember besides its engines: random number generators, callbacks, position."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator

from trial_core.controller.safe_load import Reader, unreadable_classes
from trial_core.errors import CheckpointDamaged
from trial_core.pytorch.callback import PyTorchCallback

logger = logging.getLogger(__name__)

STATE_FOLDER = "trialflow"


def seed_everything(seed: int) -> None:
    """Seed Python, numpy, torch and the accelerator of this rank."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if get_accelerator().device_name() != "cpu":
        get_accelerator().manual_seed_all(seed)


def capture_rng() -> dict[str, Any]:
    """The state of every generator that training draws from, as plain data and tensors."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        # As a list: an array would need numpy's pickling, which torch refuses to load by default.
        "numpy": (str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), gauss),
        "torch": torch.get_rng_state(),
    }
    if get_accelerator().device_name() != "cpu":
        state["accelerator"] = get_accelerator().get_rng_state()
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Put every generator back to where `capture_rng` found it."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "accelerator" in state and get_accelerator().device_name() != "cpu":
        get_accelerator().set_rng_state(state["accelerator"])


def rank_state(
    batches_trained: int,
    callbacks: Mapping[str, PyTorchCallback],
    training_data: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """This rank's own state, the dictionary that `on_checkpoint_save_start` sees.

    Args:
        training_data: where the training data stands; None on a rank that needs none.
    """
    return {
        "batches_trained": batches_trained,
        "training_data": training_data,
        "rng": capture_rng(),
        "callbacks": {name: callback.state_dict() for name, callback in callbacks.items()},
    }


def write_rank_state(folder: Path, rank: int, state: Mapping[str, Any]) -> None:
    """Write `state` to this rank's file below a checkpoint's `folder`."""
    path = _state_path(folder, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(dict(state), path)
    if odd := unreadable_classes(path):
        logger.warning(
            "the state of callbacks or loaders holds objects of %s: to resume from it, "
            "checkpointing.trusted must be true", ", ".join(odd),
        )  # fmt: skip


def has_rank_state(folder: Path, rank: int) -> bool:
    """Whether a rank of that number has saved a state."""
    return _state_path(folder, rank).is_file()


def read_rank_state(folder: Path, rank: int, reader: Reader) -> dict[str, Any]:
    """What `write_rank_state` wrote.

    Raises:
        CheckpointDamaged: the checkpoint has no state of this rank.
        CheckpointError: it holds objects that only a trusted checkpoint may.
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
    """Hand every callback the state that was saved under its name, if any was."""
    saved = state.get("callbacks") or {}  # a callback may have taken it out
    for name, callback in callbacks.items():
        if name in saved:
            callback.load_state_dict(saved[name])
        elif type(callback).load_state_dict is not PyTorchCallback.load_state_dict:
            logger.warning("the checkpoint has no state of a callback called %r", name)


def _state_path(folder: Path, rank: int) -> Path:
    return folder / STATE_FOLDER / f"rank-{rank:05d}.pt"
