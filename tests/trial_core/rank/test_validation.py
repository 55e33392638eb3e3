"""Every way to validate, on real ranks: every sample counts exactly once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.slots import ONE_TWO_FOUR, drive, toy_config
from trial_core.processes.slots.slot_group import SlotGroup

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]


def validate(slots: SlotGroup, folder: Path, trial: str, **hparams: Any) -> dict[str, Any]:
    config = toy_config(folder, 1, entrypoint=f"evaluation_trials:{trial}", hyperparameters=hparams)
    return drive(slots, config, folder).validation[-1]


@pytest.mark.parametrize("trial", ["Indices", "WithoutLength", "WithoutIndex"])
@pytest.mark.parametrize("world_size", ONE_TWO_FOUR)
def test_every_sample_counts_once(
    warm_slots: Warm, tmp_path: Path, world_size: int, trial: str
) -> None:
    """In metrics and custom reducers, with unequal shards: 14 samples in micro-batches of 2.

    Also without a loader length, and without evaluate_batch's batch_idx.
    """
    metrics = validate(warm_slots(world_size), tmp_path, trial, validation_samples=14)
    assert metrics["mean_index"] == pytest.approx(6.5)
    assert metrics["indices"] == list(range(14))
    assert (metrics["reducer_sum"], metrics["reducer_count"]) == (91, 14)


@pytest.mark.parametrize("trial", ["Indices", "WithoutLength"])
@pytest.mark.parametrize(
    ("world_size", "samples"),
    [(2, 14), (2, 2), *(pytest.param(4, n, marks=pytest.mark.long) for n in (14, 4))],
)
def test_padding_does_not_count(
    warm_slots: Warm, tmp_path: Path, world_size: int, samples: int, trial: str
) -> None:
    """Under ZeRO-3 a shorter or empty shard is padded with a batch that no reducer counts.

    Not even a reducer whose partial result is an object that later updates change.
    """
    metrics = validate(
        warm_slots(world_size), tmp_path, trial, validation_samples=samples, zero_stage=3
    )
    assert metrics["mean_index"] == pytest.approx((samples - 1) / 2)
    assert metrics["indices"] == list(range(samples))
    assert metrics["reducer_count"] == samples


@pytest.mark.parametrize("world_size", ONE_TWO_FOUR)
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_a_custom_loader_without_a_length_is_read_to_its_end(
    warm_slots: Warm, tmp_path: Path, world_size: int, zero_stage: int
) -> None:
    """On each rank its own shard."""
    metrics = validate(
        warm_slots(world_size), tmp_path, "OwnLoader", validation_samples=13, zero_stage=zero_stage
    )
    assert metrics["indices"] == list(range(13))


@pytest.mark.parametrize("world_size", ONE_TWO_FOUR)
def test_an_evaluate_batch_call_may_take_several_micro_batches(
    warm_slots: Warm, tmp_path: Path, world_size: int
) -> None:
    """8 micro-batches, 2 in each call: the validation ends with the data."""
    metrics = validate(warm_slots(world_size), tmp_path, "TwoPerCall", validation_samples=16)
    assert metrics["reducer_count"] == 16


@pytest.mark.parametrize("world_size", ONE_TWO_FOUR)
def test_each_metric_has_its_reducer(warm_slots: Warm, tmp_path: Path, world_size: int) -> None:
    """7 batches with mean indices 0.5, 2.5, … 12.5, reduced over batches and ranks."""
    metrics = validate(warm_slots(world_size), tmp_path, "ReducerPerMetric", validation_samples=14)
    reduced = {name: metrics[name] for name in ("avg", "sum", "max", "min")}
    assert reduced == {"avg": 6.5, "sum": 45.5, "max": 12.5, "min": 0.5}


@pytest.mark.parametrize("world_size", ONE_TWO_FOUR)
def test_evaluate_full_dataset_gets_the_unsharded_set_on_rank_0(
    warm_slots: Warm, tmp_path: Path, world_size: int
) -> None:
    """Every rank gets its metrics."""
    metrics = validate(warm_slots(world_size), tmp_path, "FullDataset", validation_samples=13)
    assert metrics["indices"] == list(range(13))
    assert metrics["rank"] == 0
