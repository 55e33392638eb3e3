"""Custom reducers in train-workloads, over real ranks and several workloads."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.slots import ONE_TWO_FOUR, Driven, drive, lines, toy_config
from trial_core.processes.slots.slot_group import SlotGroup
from trial_core.rank.trial.metric_values import as_reported

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]

# The batches of each train-workload, with a validation between the two.
WORKLOADS = (range(3), range(3, 5))
CUSTOM = {"mean", "smallest", "span", "order", "by_two_and_three", "by_three"}


class Run(NamedTuple):
    """A run of the trial `TrainingMetrics`."""

    driven: Driven
    folder: Path
    ranks: range

    def updates(self, workload: range) -> list[list[list[float]]]:
        """The arguments of `update` on each rank, in each `train_batch` of a workload."""
        return [
            [
                indices[: 1 + rank % 2]
                for batch, _, *indices in lines(self.folder, "samples", rank)
                if batch in workload
            ]
            for rank in self.ranks
        ]

    def values(self, workload: range) -> list[float]:
        """The arguments of `update` on all ranks."""
        return [value for rank in self.updates(workload) for batch in rank for value in batch]


@pytest.fixture(scope="module", params=ONE_TWO_FOUR)
def run(
    warm_slots: Warm, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Run:
    """Two workloads of 3 and 2 batches, with 2 micro-batches per batch and rank."""
    folder, world_size = tmp_path_factory.mktemp("reducers"), request.param
    config = toy_config(
        folder, 5, entrypoint="reducer_trials:TrainingMetrics", scheduling_unit=3,
        min_validation_period={"batches": 3}, checkpoint_policy="none", hyperparameters={
            "accumulation": 2, "train_samples": 20 * world_size, "record": str(folder),
            "validation_samples": 14, "shuffle": False,
        },
    )  # fmt: skip
    driven = drive(warm_slots(world_size), config, folder)
    assert driven.stages[:4] == ["train [0→3]", "validate @3", "train [3→5]", "validate @5"]
    return Run(driven, folder, range(world_size))


def test_a_named_metric_reduces_all_values_of_its_workload(run: Run) -> None:
    """Not the mean of the ranks' means, and no values of an earlier workload or validation.

    An array of one element becomes a number.
    """
    for workload, metrics in zip(WORKLOADS, run.driven.training, strict=True):
        values = run.values(workload)
        assert metrics["mean"] == pytest.approx(sum(values) / len(values), abs=1e-4)


def test_a_function_without_a_name_gives_several_metrics(run: Run) -> None:
    """Each under its name; lists of lists stay as they are."""
    for workload, metrics in zip(WORKLOADS, run.driven.training, strict=True):
        values = run.values(workload)
        assert metrics["smallest"] == min(values)
        assert metrics["span"] == [[min(values), max(values)], [sum(values), len(values)]]


def test_a_class_without_a_name_gives_several_metrics(run: Run) -> None:
    """Arrays become lists. The reducer also serves validations, whose values do not count here."""
    for workload, metrics in zip(WORKLOADS, run.driven.training, strict=True):
        found = Counter((int(value) % 2, int(value) % 3) for value in run.values(workload))
        table = [[found[two, three] for three in range(3)] for two in range(2)]
        assert metrics["by_two_and_three"] == table
        assert metrics["by_three"] == [sum(column) for column in zip(*table, strict=True)]


def test_functions_get_values_in_the_order_of_the_unsharded_data(run: Run) -> None:
    """Ranks take turns; with one value per micro-batch, every second sample."""
    begin = 0
    for workload, metrics in zip(WORKLOADS, run.driven.training, strict=True):
        micro_batches = len(workload) * 2 * len(run.ranks)
        assert metrics["order"] == [2.0 * (begin + i) for i in range(micro_batches)]
        begin += micro_batches


def test_a_reducer_reports_only_in_its_kind_of_workload(run: Run) -> None:
    """A training reducer in no validation and the reverse; other updates do not count."""
    own = {"loss", "rank"}
    assert [set(metrics) - own for metrics in run.driven.training] == [CUSTOM] * 2
    for metrics in run.driven.validation:
        assert set(metrics) == {
            "loss", "mean_index", "backwards", "by_two_and_three", "by_three"
        }  # fmt: skip
        assert metrics["backwards"] == list(range(13, -1, -1))
        assert metrics["by_three"] == [5, 5, 4]


def test_every_rank_gets_the_same_metrics(run: Run) -> None:
    """`on_training_workload_end` gets what the reducers returned, and reports are plain data."""
    for rank in run.ranks:
        seen = [line["average"] for line in lines(run.folder, "hooks", rank) if "average" in line]
        assert [as_reported(each, "a hook") for each in seen] == run.driven.training
        assert isinstance(seen[0]["mean"], list), "the array that the reducer returned"
    assert json.loads(json.dumps(run.driven.training)) == run.driven.training


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_updates_on_ranks_without_metrics_do_not_count(
    warm_slots: Warm, tmp_path: Path, world_size: int
) -> None:
    """If each model spans two ranks, only the reporting rank's values count."""
    hparams: dict[str, Any] = {"train_samples": 32, "validation_samples": 8}
    config = toy_config(
        tmp_path, 3, entrypoint="reducer_trials:ReportedByHalf", scheduling_unit=2,
        hyperparameters=hparams,
    )  # fmt: skip
    driven = drive(warm_slots(world_size), config, tmp_path)
    # Two calls of train_batch a batch; workloads of two batches and of one.
    reporting = range(0, world_size, 2)
    assert [metrics["ranks"] for metrics in driven.training] == [
        [rank for rank in reporting for _ in range(calls)] for calls in (4, 2)
    ]
