"""A resumed run is the uninterrupted run, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.slots import Driven, drive, lines, toy_config
from tests.support.tensors import differing, tensors
from trial_core.slots.group import SlotGroup

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]


def stored(folder: Path, run: Driven) -> dict[str, torch.Tensor]:
    return tensors(folder / "checkpoints" / "checkpoints" / run.checkpoints[-1])


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_resuming_is_bit_identical(warm_slots: Warm, tmp_path: Path, zero_stage: int) -> None:
    """12 batches straight, and 5 + 7 with a checkpoint between them, on 2 ranks with accumulation
    3, shuffling and dropout: the same micro-batches, random state, weights and optimizer state."""

    def config(folder: Path, batches: int) -> Any:
        folder.mkdir(exist_ok=True)
        return toy_config(
            folder, batches, scheduling_unit=4, hyperparameters={
                "accumulation": 3, "train_samples": 50, "zero_stage": zero_stage,
                "record": str(folder),
            },
        )  # fmt: skip

    straight, parts = tmp_path / "straight", tmp_path / "parts"
    slots = warm_slots(2)
    whole = drive(slots, config(straight, 12), straight, persist=True)
    first = drive(slots, config(parts, 5), parts, persist=True)
    rest = drive(slots, config(parts, 12), parts, resume=first, persist=True)

    for rank in (0, 1):
        assert lines(parts, "samples", rank) == lines(straight, "samples", rank)
    expected, seen = stored(straight, whole), stored(parts, rest)
    assert len(expected) > 10
    assert differing(expected, seen) == []
    assert rest.validation[-1] == whole.validation[-1]


def test_callbacks_get_their_state_back(warm_slots: Warm, tmp_path: Path) -> None:
    """A callback that counts epochs goes on counting where it was saved."""
    hparams = {"train_samples": 8, "record": str(tmp_path)}
    first = drive(
        warm_slots(2), toy_config(tmp_path, 4, hyperparameters=hparams), tmp_path, persist=True
    )
    drive(warm_slots(2), toy_config(tmp_path, 8, hyperparameters=hparams), tmp_path, resume=first)
    counted = [line["seen"] for line in lines(tmp_path, "hooks", 0) if "seen" in line]
    assert counted == [1, 2, 3, 4]
