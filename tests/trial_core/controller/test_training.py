"""What ranks do in train-workloads and validations, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.slots import Driven, drive, lines, toy_config
from trial_core.slots.group import SlotGroup

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]


def count(run: Driven, what: str) -> int:
    return sum(stage.startswith(what) for stage in run.stages)


def test_every_period_fires_when_due(warm_slots: Warm, tmp_path: Path) -> None:
    """Reports every 13, validations every 7 and checkpoints every 11 batches, mutually prime."""
    config = toy_config(
        tmp_path, 80, scheduling_unit=13, min_validation_period={"batches": 7},
        min_checkpoint_period={"batches": 11}, checkpoint_policy="none",
        hyperparameters={"record": str(tmp_path)},
    )  # fmt: skip
    run = drive(warm_slots(2), config, tmp_path)
    expected_validations = [*range(7, 80, 7), 80]
    expected_checkpoints = [*range(11, 80, 11), 80]
    assert [s for s in run.stages if s.startswith("validate")] == [
        f"validate @{b}" for b in expected_validations
    ]
    assert [s for s in run.stages if s.startswith("checkpoint")] == [
        f"checkpoint @{b}" for b in expected_checkpoints
    ]
    boundaries = sorted({*range(13, 80, 13), *expected_validations, *expected_checkpoints})
    assert count(run, "train") == len(boundaries)
    # The trial itself saw every batch exactly once, on both ranks.
    for rank in (0, 1):
        assert [line[0] for line in lines(tmp_path, "samples", rank)] == list(range(80))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_training_metrics_are_averaged_once(
    warm_slots: Warm, tmp_path: Path, world_size: int
) -> None:
    """Every rank reports its number: the average is that of 0 … n-1, reduced exactly once."""
    run = drive(warm_slots(world_size), toy_config(tmp_path, 3), tmp_path)
    assert run.training[-1]["rank"] == (world_size - 1) / 2


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_validation_averages_over_all_batches_of_unequal_shards(
    warm_slots: Warm, tmp_path: Path, world_size: int
) -> None:
    """14 samples in micro-batches of 2 are 7 batches: no number of ranks here shares them evenly,
    and the mean over all batches is that of the indices 0 … 13 all the same."""
    config = toy_config(tmp_path, 1, hyperparameters={"validation_samples": 14})
    run = drive(warm_slots(world_size), config, tmp_path)
    assert run.validation[-1]["mean_index"] == pytest.approx(6.5)


def test_zero_3_validates_unequal_shards_without_hanging(warm_slots: Warm, tmp_path: Path) -> None:
    """Under ZeRO-3 a forward pass needs all ranks: the shorter shard keeps step, uncounted."""
    hparams = {"validation_samples": 14, "zero_stage": 3}
    run = drive(warm_slots(2), toy_config(tmp_path, 1, hyperparameters=hparams), tmp_path)
    assert run.validation[-1]["mean_index"] == pytest.approx(6.5)


def test_epoch_hooks_fire_once_an_epoch(warm_slots: Warm, tmp_path: Path) -> None:
    """10 micro-batches an epoch, 3 x 2 a batch: epochs begin and end inside batches, and each
    still starts once and ends once, in order."""
    config = toy_config(
        tmp_path, 6, hyperparameters={
            "train_samples": 20, "accumulation": 3, "record": str(tmp_path)
        },
    )  # fmt: skip
    drive(warm_slots(2), config, tmp_path)
    hooks = [
        (line["hook"].removeprefix("on_training_epoch_"), line["epoch"])
        for line in lines(tmp_path, "hooks", 1)
        if "epoch" in line
    ]
    # 36 micro-batches: epochs 0, 1, 2 are over, epoch 3 has begun.
    assert [e for kind, e in hooks if kind == "start"] == [0, 1, 2, 3]
    assert [e for kind, e in hooks if kind == "end"] == [0, 1, 2]
    assert hooks.index(("end", 0)) < hooks.index(("start", 1))


def test_each_epoch_shows_every_sample_once(warm_slots: Warm, tmp_path: Path) -> None:
    """Over all ranks together, an epoch is every sample exactly once, shuffled anew."""
    config = toy_config(tmp_path, 8, hyperparameters={"train_samples": 16, "record": str(tmp_path)})
    drive(warm_slots(2), config, tmp_path)
    seen = [[line[2:] for line in lines(tmp_path, "samples", rank)] for rank in (0, 1)]
    epochs = [
        [sample for rank in seen for batch in rank[begin : begin + 4] for sample in batch]
        for begin in (0, 4)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(16))
    assert epochs[0] != epochs[1]


def test_a_stop_that_one_rank_asks_for_ends_the_run_after_its_workload(
    warm_slots: Warm, tmp_path: Path
) -> None:
    """set_stop_requested on rank 1 alone: the workload is finished, a checkpoint taken, no more."""
    config = toy_config(
        tmp_path, 50, scheduling_unit=5,
        hyperparameters={"at_batch": 7, "do": "stop", "do_rank": 1},
    )  # fmt: skip
    run = drive(warm_slots(2), config, tmp_path)
    assert run.stages == ["train [0→5]", "train [5→10]", "checkpoint @10"]
