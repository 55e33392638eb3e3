"""Warm ranks train one trial after the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.slots import drive, toy_config
from trial_core.processes.slots.slot_group import SlotGroup

pytestmark = pytest.mark.slots


def test_ranks_keep_nothing_of_earlier_trials(
    warm_slots: Callable[[int], SlotGroup], tmp_path: Path
) -> None:
    """Each ZeRO stage keeps its engines in its own way. `make bench NAME=rebuild` has many more."""
    for stage in (0, 1, 2, 3, 3):
        config = toy_config(
            tmp_path, 4, entrypoint="successive_trials:Successive",
            hyperparameters={"zero_stage": stage},
        )  # fmt: skip
        run = drive(warm_slots(2), config, tmp_path)
        assert [metrics["left"] for metrics in run.training] == [0.0] * len(run.training)
        assert run.training


def test_ranks_keep_nothing_of_earlier_pipelines(
    warm_slots: Callable[[int], SlotGroup], tmp_path: Path
) -> None:
    """Neither engines and models nor process groups, whose threads would add up."""
    for zero_stage in (0, 1, 0):
        config = toy_config(
            tmp_path, 2, entrypoint="successive_trials:SuccessivePipeline",
            hyperparameters={"zero_stage": zero_stage},
        )  # fmt: skip
        run = drive(warm_slots(2), config, tmp_path)
        assert [metrics["left"] for metrics in run.training] == [0.0] * len(run.training)
        assert run.training
