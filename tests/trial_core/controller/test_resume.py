"""A resumed run is the uninterrupted run, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.slots import drive, lines, toy_config
from tests.trial_core.deepspeed.resuming import assert_resuming_is_bit_identical
from trial_core.slots.group import SlotGroup

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_resuming_is_bit_identical(
    warm_slots: Warm, tmp_path: Path, world_size: int, zero_stage: int
) -> None:
    """With accumulation 3, which is three calls of train_batch a batch, shuffling and dropout: the
    same micro-batches, random state, weights and optimizer state."""
    assert_resuming_is_bit_identical(
        warm_slots(world_size), tmp_path, "engine_trials:OwnConfig", accumulation=3,
        ds_config={"zero_optimization": {"stage": zero_stage}},
    )  # fmt: skip
    for rank in range(world_size):
        calls = [line[0] for line in lines(tmp_path / "parts", "samples", rank)]
        assert calls == [batch for batch in range(9) for _ in range(3)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_callbacks_get_their_state_back(warm_slots: Warm, tmp_path: Path, world_size: int) -> None:
    """On every rank, a callback that counts epochs goes on counting where it was saved."""
    hparams = {"train_samples": 4 * world_size, "record": str(tmp_path)}
    slots = warm_slots(world_size)
    first = drive(slots, toy_config(tmp_path, 4, hyperparameters=hparams), tmp_path, persist=True)
    drive(slots, toy_config(tmp_path, 8, hyperparameters=hparams), tmp_path, resume=first)
    for rank in range(world_size):
        counted = [line["seen"] for line in lines(tmp_path, "hooks", rank) if "seen" in line]
        assert counted == [1, 2, 3, 4]
