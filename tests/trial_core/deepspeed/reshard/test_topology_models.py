"""Models that are divided over ranks go on in any number of copies; several models all do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.slots import drive, toy_config
from tests.support.tensors import differing, tensors
from tests.trial_core.deepspeed.reshard.moving import files, moved
from trial_core.config import ExperimentConfig
from trial_core.slots.group import SlotGroup

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]


@pytest.mark.parametrize(
    ("trial", "stage"),
    [
        ("parallel_trials:PipelineTrial", 0),
        ("parallel_trials:PipelineTrial", 1),
        ("parallel_trials:TensorParallelTrial", 1),
        ("parallel_trials:TensorParallelTrial", 3),
        ("engine_trials:Independent", 2),
    ],
)
def test_two_copies_of_a_divided_model_are_one_again(
    warm_slots: Warm, tmp_path: Path, trial: str, stage: int
) -> None:
    """From 2 ranks to 4 and back, each stage, each part and each of several engines keeps its
    weights and moments."""

    def settings(ranks: int) -> ExperimentConfig:
        # Of another seed each, so that what is not restored shows; as many samples in a batch.
        return toy_config(
            tmp_path, 3, entrypoint=trial,
            reproducibility={"experiment_seed": ranks},
            hyperparameters={"zero_stage": stage, "accumulation": 8 // ranks},
        )  # fmt: skip

    first = drive(warm_slots(2), settings(2), tmp_path, persist=True)
    twice = moved(warm_slots(4), settings(4), tmp_path / "twice", first)
    again = moved(warm_slots(2), settings(2), tmp_path / "again", twice)

    expected, seen = (shards(files(tmp_path, run.checkpoints[-1])) for run in (first, again))
    assert len(expected) >= 12
    assert differing(expected, seen) == []


def shards(stored: Path) -> dict[str, torch.Tensor]:
    """The tensors of all engines, without the ranks' own."""
    return {name: each for name, each in tensors(stored).items() if name.startswith("model")}
