"""Epochs of `trial_core.pytorch.DataLoader` on real ranks, resumed within an epoch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.slots import ONE_TWO_FOUR, drive, lines, toy_config
from tests.trial_core.deepspeed.resuming import assert_resuming_is_bit_identical
from trial_core.processes.slots.slot_group import SlotGroup

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]


def epochs(folder: Path, world_size: int, length: int) -> list[list[float]]:
    """The samples of all ranks in the order of the unsharded data, by epoch."""
    recorded = [lines(folder, "samples", rank) for rank in range(world_size)]
    assert len({len(calls) for calls in recorded}) == 1
    seen = [i for calls in zip(*recorded, strict=True) for _, _, *own in calls for i in own]
    return [seen[begin : begin + length] for begin in range(0, len(seen), length)]


@pytest.mark.parametrize("world_size", ONE_TWO_FOUR)
@pytest.mark.parametrize(
    "hparams",
    [
        {},
        pytest.param({"workers": 2}, marks=pytest.mark.long),
        pytest.param({"workers": 2, "persistent_workers": True}, marks=pytest.mark.long),
        pytest.param(
            {"workers": 2, "persistent_workers": True, "shuffle": False}, marks=pytest.mark.long
        ),
        pytest.param({"workers": 2, "iterable": True}, marks=pytest.mark.long),
    ],
    ids=lambda hparams: "-".join(hparams) or "plain",
)
def test_an_epoch_has_every_sample_once_after_a_restart_within_it(
    warm_slots: Warm, tmp_path: Path, world_size: int, hparams: dict[str, Any]
) -> None:
    """Order, augmentations and weights are those of the uninterrupted run.

    21 samples in micro-batches of 2, the last of 1. The checkpoint is after 12, 24 or 48
    micro-batches, none of which ends an epoch. A shuffled epoch has another order than the last.
    """
    assert_resuming_is_bit_identical(
        warm_slots(world_size), tmp_path, "loader_trials:Epochs",
        accumulation=3, train_samples=21, **hparams,
    )  # fmt: skip
    *whole, last = epochs(tmp_path / "parts", world_size, 21)
    assert len(whole) > 1
    assert [sorted(epoch) for epoch in whole] == [list(range(21))] * len(whole)
    assert len(set(last)) == len(last)
    assert (whole[0] != whole[1]) == hparams.get("shuffle", True)


@pytest.mark.parametrize(
    ("world_size", "started", "ended"),
    [
        pytest.param(1, 2, 1, marks=pytest.mark.long),
        (2, 4, 3),
        pytest.param(4, 7, 7, marks=pytest.mark.long),
    ],
)
def test_epoch_hooks_are_called_once_per_epoch(
    warm_slots: Warm, tmp_path: Path, world_size: int, started: int, ended: int
) -> None:
    """In order on every rank, although epochs begin and end inside batches.

    An epoch has 10 micro-batches, a batch 3 per rank; the run has 18, 36 or 72 in all.
    """
    config = toy_config(
        tmp_path, 6, hyperparameters={
            "train_samples": 20, "accumulation": 3, "record": str(tmp_path)
        },
    )  # fmt: skip
    drive(warm_slots(world_size), config, tmp_path)
    for rank in range(world_size):
        hooks = [
            (line["hook"].removeprefix("on_training_epoch_"), line["epoch"])
            for line in lines(tmp_path, "hooks", rank)
            if "epoch" in line
        ]
        assert [epoch for kind, epoch in hooks if kind == "start"] == list(range(started))
        assert [epoch for kind, epoch in hooks if kind == "end"] == list(range(ended))
        assert hooks.index(("end", 0)) < hooks.index(("start", 1))
