"""What callbacks may do in a validation, on real ranks."""

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
def test_every_validation_hook_runs_in_evaluation_mode_without_gradients(
    warm_slots: Warm, tmp_path: Path, world_size: int
) -> None:
    """A callback may sample from the model without dropout. Training gets its mode back.

    What the hooks before the end add to a custom reducer counts, once in each validation.
    """
    config = toy_config(
        tmp_path, 2, entrypoint="validation_hook_trials:Sampling",
        min_validation_period={"batches": 1}, hyperparameters={"record": str(tmp_path)},
    )  # fmt: skip
    validations = drive(warm_slots(world_size), config, tmp_path).validation
    for rank in range(world_size):
        sampled = [
            (line["hook"], line["repeats"], line["grad"])
            for line in logged(tmp_path, rank, "sampled")
        ]
        hooks = ("start", "epoch_start", "epoch_end", "end")
        assert sampled == [(hook, True, False) for hook in hooks] * 2
        trained = [(line["training"], line["grad"]) for line in logged(tmp_path, rank, "trained")]
        assert trained == [(True, True)] * 2
    for metrics in validations:
        added = {name: metrics[name] for name in ("start", "epoch_start", "epoch_end", "end")}
        assert added == {
            "start": world_size, "epoch_start": world_size, "epoch_end": world_size, "end": 0
        }  # fmt: skip


@pytest.mark.parametrize("world_size", ONE_TWO_FOUR)
def test_on_validation_end_may_change_the_metrics(
    warm_slots: Warm, tmp_path: Path, world_size: int
) -> None:
    """The metrics of rank 0 count: also for the searcher metric, which no batch can tell."""
    config = toy_config(
        tmp_path, 2, entrypoint="validation_hook_trials:Changed",
        min_validation_period={"batches": 1},
        searcher={"name": "single", "metric": "perplexity", "max_length": {"batches": 2}},
    )  # fmt: skip
    run = drive(warm_slots(world_size), config, tmp_path, names_metrics=True)
    assert run.metric_names == ["loss", "mean_index"]  # those of the batches
    assert [sorted(metrics) for metrics in run.validation] == [["mean_index", "perplexity"]] * 2
    assert [metrics["perplexity"] for metrics in run.validation] == [10, 20]


def test_metrics_that_a_callback_of_another_rank_changes_do_not_count(
    warm_slots: Warm, tmp_path: Path
) -> None:
    """Rank 0 has no callback, and reports the metrics as they were."""
    config = toy_config(
        tmp_path, 1, entrypoint="validation_hook_trials:Changed",
        hyperparameters={"callback_on": 1},
    )  # fmt: skip
    (metrics,) = drive(warm_slots(2), config, tmp_path).validation
    assert sorted(metrics) == ["loss", "mean_index"]
