"""Train-workloads on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.slots import ONE_TWO_FOUR, Driven, drive, lines, toy_config
from trial_core.processes.slots.slot_group import SlotGroup

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
    # The trial trained every batch exactly once, on both ranks.
    for rank in (0, 1):
        assert [line[0] for line in lines(tmp_path, "samples", rank)] == list(range(80))


@pytest.mark.parametrize("world_size", ONE_TWO_FOUR)
def test_training_metrics_are_averaged_once(
    warm_slots: Warm, tmp_path: Path, world_size: int
) -> None:
    """Every rank reports its number: the result is the average of 0 … n-1."""
    run = drive(warm_slots(world_size), toy_config(tmp_path, 3), tmp_path)
    assert run.training[-1]["rank"] == (world_size - 1) / 2


@pytest.mark.parametrize(
    ("world_size", "rank"),
    [
        pytest.param(1, 0, marks=pytest.mark.long),
        (2, 1),
        pytest.param(4, 2, marks=pytest.mark.long),
    ],
)
def test_a_stop_request_of_one_rank_ends_the_run(
    warm_slots: Warm, tmp_path: Path, world_size: int, rank: int
) -> None:
    """set_stop_requested in the 8th batch: all ranks end after it, or after the 9th, and save.

    The 9th is the last one if another rank has begun it by then.
    """
    config = toy_config(
        tmp_path, 50, scheduling_unit=50,
        hyperparameters={"at_batch": 7, "do": "stop", "do_rank": rank, "record": str(tmp_path)},
    )  # fmt: skip
    run = drive(warm_slots(world_size), config, tmp_path)
    reached = run.progress.batches_trained
    assert reached == 8 or (reached == 9 and world_size > 1)
    assert run.stages == ["train [0→50]", f"checkpoint @{reached}"]
    for each in range(world_size):
        assert [line[0] for line in lines(tmp_path, "samples", each)] == list(range(reached))
