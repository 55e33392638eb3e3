"""Model-parallel trials, and trials with several engines, are resharded too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.slots import drive, toy_config
from tests.support.tensors import differing, tensors
from tests.trial_core.deepspeed.reshard.resharding import files, resharded
from trial_core.config import ExperimentConfig
from trial_core.slots.slot_group import SlotGroup

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]


@pytest.mark.long
@pytest.mark.parametrize(
    ("trial", "stage"),
    [
        ("parallel_trials:PipelineTrial", 1),
        ("parallel_trials:PipelineTrial", 0),
        ("parallel_trials:TensorParallelTrial", 1),
        ("parallel_trials:TensorParallelTrial", 3),
        ("engine_trials:Independent", 2),
    ],
)
def test_from_one_copy_to_two_and_back(
    warm_slots: Warm, tmp_path: Path, trial: str, stage: int
) -> None:
    """From 2 ranks to 4 and back, all weights and moments of all engines stay the same."""

    def settings(ranks: int) -> ExperimentConfig:
        # Different seeds show what is not restored. The number of samples in a batch is the same.
        return toy_config(
            tmp_path, 3, entrypoint=trial,
            reproducibility={"experiment_seed": ranks},
            hyperparameters={"zero_stage": stage, "accumulation": 8 // ranks},
        )  # fmt: skip

    first = drive(warm_slots(2), settings(2), tmp_path, persist=True)
    on_four = resharded(warm_slots(4), settings(4), tmp_path / "four", first)
    on_two = resharded(warm_slots(2), settings(2), tmp_path / "two", on_four)

    expected, seen = (shards(files(tmp_path, run.checkpoints[-1])) for run in (first, on_two))
    assert len(expected) >= 12
    assert differing(expected, seen) == []


def shards(stored: Path) -> dict[str, torch.Tensor]:
    """The tensors of all engines, without the ranks' own states."""
    return {name: each for name, each in tensors(stored).items() if name.startswith("model")}
