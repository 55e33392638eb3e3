"""Custom model parallelism with set_mpu: two copies of a model, each on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.slots import drive, lines, toy_config
from tests.trial_core.deepspeed.resuming import assert_resuming_is_bit_identical
from trial_core.deepspeed.mpu import ModelParallelUnit, check_mpu
from trial_core.errors import TrialError
from trial_core.processes.slots.slot_group import SlotGroup

Warm = Callable[[int], SlotGroup]
TENSOR_PARALLEL = "parallel_trials:TensorParallelTrial"


@pytest.mark.slots
def test_data_metrics_and_seeds_follow_the_data_parallel_rank(
    warm_slots: Warm, tmp_path: Path
) -> None:
    """The two ranks of a copy share samples and random numbers, the two copies do not. Only ranks 0
    and 2 report: their average is 1."""
    config = toy_config(
        tmp_path, 8, entrypoint=TENSOR_PARALLEL,
        hyperparameters={"record": str(tmp_path), "train_samples": 64},
    )  # fmt: skip
    run = drive(warm_slots(4), config, tmp_path)
    recorded = [lines(tmp_path, "samples", rank) for rank in range(4)]
    assert recorded[0] == recorded[1]
    assert recorded[2] == recorded[3]
    assert recorded[0][0][1] != recorded[2][0][1]
    epoch = [index for rank in (0, 2) for line in recorded[rank] for index in line[2][0]]
    assert sorted(epoch) == list(range(64))
    assert run.training[-1]["rank"] == 1


@pytest.mark.slots
def test_unequal_shards_are_validated_in_lockstep(warm_slots: Warm, tmp_path: Path) -> None:
    """Of 7 micro-batches one copy has 3 and repeats one that does not count; neither do reducer
    values of ranks that do not report."""
    config = toy_config(
        tmp_path, 1, entrypoint=TENSOR_PARALLEL, hyperparameters={"validation_samples": 14}
    )
    run = drive(warm_slots(4), config, tmp_path)
    assert run.validation[-1]["indices"] == list(range(14))
    assert run.validation[-1]["mean_index"] == pytest.approx(6.5)
    assert run.validation[-1]["rank"] == pytest.approx(6 / 7)  # 4 batches of rank 0, 3 of rank 2


@pytest.mark.slots
@pytest.mark.parametrize("zero_stage", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_model_of_two_ranks_resumes_bit_identically(
    warm_slots: Warm, tmp_path: Path, zero_stage: int
) -> None:
    """Both parts of both copies are saved and restored."""
    assert_resuming_is_bit_identical(
        warm_slots(4), tmp_path, TENSOR_PARALLEL, zero_stage=zero_stage
    )


class Ranks:
    """A DistributedContext with the units of all ranks."""

    def __init__(self, *units: ModelParallelUnit) -> None:
        self.units = units

    def allgather(self, mine: Any) -> list[Any]:
        return [tuple(vars(unit).values()) for unit in self.units]


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (
            [(0, 2, True, True), (0, 2, True, True)],
            r"from 0 to n - 1; seen, rank by rank: \['0 of 2', '0 of 2'\]",
        ),
        (
            [(0, 2, True, True), (1, 3, True, True)],
            r"same data_parallel_world_size n.*\['0 of 2', '1 of 3'\]",
        ),
        (
            [(0, 2, False, True), (1, 2, False, True)],
            "no rank has should_report_metrics=True in its ModelParallelUnit",
        ),
        (
            [(0, 1, True, False), (0, 1, False, False)],
            "no rank has should_build_data_loader=True in its ModelParallelUnit",
        ),
    ],
)
def test_inconsistent_units_are_refused(units: list[Any], message: str) -> None:
    """The error says what every rank gave, or what is missing."""
    made = [ModelParallelUnit(*unit) for unit in units]
    with pytest.raises(TrialError, match=message):
        check_mpu(made[0], Ranks(*made))  # type: ignore[arg-type]
