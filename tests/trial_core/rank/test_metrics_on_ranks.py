"""Metrics of every type, averaged over real ranks where they are numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.hook_calls import logged
from tests.support.slots import ONE_TWO_FOUR, drive, toy_config
from trial_core.processes.slots.slot_group import SlotGroup

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]


@pytest.mark.parametrize("world_size", ONE_TWO_FOUR)
def test_metrics_of_every_type(warm_slots: Warm, tmp_path: Path, world_size: int) -> None:
    """3 batches of 2 micro-batches: 6 calls on each rank.

    Numbers are averaged, without those that are None. Other values are reported as the first rank
    has returned them last. The metrics of each call are averaged over ranks, and the same on all.
    """
    config = toy_config(
        tmp_path, 3, entrypoint="metric_trials:EveryTypeOnAllRanks",
        hyperparameters={
            "record": str(tmp_path), "accumulation": 2, "validation_samples": 6 * world_size
        },
    )  # fmt: skip
    run = drive(warm_slots(world_size), config, tmp_path)
    middle = (world_size - 1) / 2
    (average,) = run.training
    assert (average["call"], average["rank"]) == (2.5, middle)
    assert average["even"] == 2 + 10 * middle
    assert average["losses"] == [[5.5, 6.0], [0, 1]]
    assert average["large"] == 2.0**62
    assert (average["note"], average["parts"]) == ("rank 0, 5", {"a": 5, "b": {"c": None}})

    for rank in range(world_size):
        (workload,) = logged(tmp_path, rank, "workload")
        assert workload["average"] == average
        batches = workload["batches"]
        assert [each["call"] for each in batches] == [0, 1, 2, 3, 4, 5]
        assert {each["rank"] for each in batches} == {middle}
        assert [each["even"] for each in batches] == [
            None if call % 2 else call + 10 * middle for call in range(6)
        ]
        assert [each["note"] for each in batches] == [f"rank 0, {call}" for call in range(6)]
        mean = sum(each["loss"] for each in batches) / 6
        assert mean == pytest.approx(average["loss"], rel=1e-6)
        (outputs,) = logged(tmp_path, rank, "outputs")
        (validated,) = logged(tmp_path, rank, "validated")
        assert outputs["shapes"] == [[1]] * 3
        assert (validated["is_best"], validated["shape"]) == (True, [])

    (validation,) = run.validation
    assert isinstance(validation["loss"], float)
    assert (validation["note"], validation["last_note"]) == ("rank 0, 2", "batch 2")
    assert validation["even"] == 1 + 10 * middle
    assert validation["large"] == 2.0**62
    assert validation["losses"] == [[2.5, 3.0], [0, 1]]


def test_a_callback_of_one_rank_gets_the_metrics_of_all(warm_slots: Warm, tmp_path: Path) -> None:
    """The ranks agree to exchange them. Rank 0 has no callback."""
    config = toy_config(
        tmp_path, 1, entrypoint="metric_trials:EveryType",
        hyperparameters={"record": str(tmp_path), "accumulation": 2},
    )  # fmt: skip
    drive(warm_slots(2), config, tmp_path)
    assert logged(tmp_path, 0, "workload") == []
    (workload,) = logged(tmp_path, 1, "workload")
    assert [each["rank"] for each in workload["batches"]] == [0.5, 0.5]
