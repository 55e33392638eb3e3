"""Custom metrics of training workloads, over real ranks and several workloads."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.slots import Driven, drive, lines, toy_config
from trial_core.slots.group import SlotGroup

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]

# Batches of each train-workload; a validation is between them.
WORKLOADS = (range(3), range(3, 5))
CUSTOM = {"mean", "smallest", "span", "order", "by_two_and_three", "by_three"}


class Run(NamedTuple):
    """A run of the trial `TrainingMetrics`."""

    driven: Driven
    folder: Path
    ranks: range

    def given(self, workload: range) -> list[list[list[float]]]:
        """What each rank passed to `update` in each `train_batch` of a workload."""
        return [
            [
                indices[: 1 + rank % 2]
                for batch, _, *indices in lines(self.folder, "samples", rank)
                if batch in workload
            ]
            for rank in self.ranks
        ]

    def values(self, workload: range) -> list[float]:
        """The same of all ranks together."""
        return [one for rank in self.given(workload) for values in rank for one in values]


@pytest.fixture(scope="module", params=[1, 2, 4])
def run(
    warm_slots: Warm, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Run:
    """Two workloads, of 3 and of 2 batches, each of 2 micro-batches a rank."""
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


def test_a_named_metric_is_of_all_values_of_its_own_workload(run: Run) -> None:
    """Not the mean of the ranks' means, which pass on unequally many; nothing of the workload or
    the validation before; and an array where the reducer returns one."""
    for workload, metrics in zip(WORKLOADS, run.driven.training, strict=True):
        values = run.values(workload)
        assert metrics["mean"] == [pytest.approx(sum(values) / len(values), abs=1e-4)]


def test_a_function_without_a_name_gives_several_metrics(run: Run) -> None:
    """Each under its own name, and lists of lists as they are; of their own workload alone."""
    for workload, metrics in zip(WORKLOADS, run.driven.training, strict=True):
        values = run.values(workload)
        assert metrics["smallest"] == min(values)
        assert metrics["span"] == [[min(values), max(values)], [sum(values), len(values)]]


def test_a_class_without_a_name_gives_several_metrics(run: Run) -> None:
    """Arrays become lists; of its own workload, though it serves validations, too."""
    for workload, metrics in zip(WORKLOADS, run.driven.training, strict=True):
        found = Counter((int(value) % 2, int(value) % 3) for value in run.values(workload))
        table = [[found[two, three] for three in range(3)] for two in range(2)]
        assert metrics["by_two_and_three"] == table
        assert metrics["by_three"] == [sum(column) for column in zip(*table, strict=True)]


def test_functions_see_values_in_the_order_of_the_unsharded_data(run: Run) -> None:
    """Ranks take turns; one value a micro-batch: every second sample, workload after workload."""
    begin = 0
    for workload, metrics in zip(WORKLOADS, run.driven.training, strict=True):
        micro_batches = len(workload) * 2 * len(run.ranks)
        assert metrics["order"] == [2.0 * (begin + i) for i in range(micro_batches)]
        begin += micro_batches


def test_reducers_report_where_they_are_wanted(run: Run) -> None:
    """Those for training only in no validation, and the reverse; what they are told elsewhere does
    not count."""
    own = {"loss", "rank"}
    assert [set(metrics) - own for metrics in run.driven.training] == [CUSTOM] * 2
    for metrics in run.driven.validation:
        assert set(metrics) == {
            "loss", "mean_index", "backwards", "by_two_and_three", "by_three"
        }  # fmt: skip
        assert metrics["backwards"] == list(range(13, -1, -1))
        assert metrics["by_three"] == [5, 5, 4]


def test_every_rank_has_the_same_metrics_as_plain_data(run: Run) -> None:
    """They are what `on_training_workload_end` is told everywhere, and JSON keeps them."""
    for rank in run.ranks:
        told = [line["average"] for line in lines(run.folder, "hooks", rank) if "average" in line]
        assert told == run.driven.training
    assert json.loads(json.dumps(run.driven.training)) == run.driven.training


@pytest.mark.parametrize("world_size", [2, 4])
def test_what_ranks_without_metrics_pass_on_does_not_count(
    warm_slots: Warm, tmp_path: Path, world_size: int
) -> None:
    """Where models span two ranks, the reducers see the values of those that report."""
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
