"""Model-parallel trials, and trials with several engines, are resharded too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.consolidated import export_weights
from tests.support.slots import build, drive, toy_config
from tests.support.tensors import differing, tensors
from tests.trial_core.deepspeed.reshard.resharding import files, resharded
from trial_core.config import ExperimentConfig
from trial_core.errors import RankFailed
from trial_core.processes.slots.slot_group import SlotGroup

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
        ("mesh_trials:AutoTP", 0),
        ("mesh_trials:AutoTP", 1),
        ("mesh_trials:AutoTP", 3),
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
            hyperparameters={"zero_stage": stage, "accumulation": 8 // ranks, "tp": 2},
        )  # fmt: skip

    first = drive(warm_slots(2), settings(2), tmp_path, persist=True)
    on_four = resharded(warm_slots(4), settings(4), tmp_path / "four", first)
    on_two = resharded(warm_slots(2), settings(2), tmp_path / "two", on_four)

    expected, seen = (shards(files(tmp_path, run.checkpoints[-1])) for run in (first, on_two))
    assert len(expected) >= 12
    assert differing(expected, seen) == []


@pytest.mark.parametrize("stage", [1, *(pytest.param(s, marks=pytest.mark.long) for s in (0, 2))])
def test_experts_that_each_rank_has(warm_slots: Warm, tmp_path: Path, stage: int) -> None:
    """A mixture with an ep_size of 1: from 2 ranks to 1 and back; the experts' weights are those of
    their own files, too."""

    def settings(ranks: int) -> ExperimentConfig:
        return _experts(tmp_path, ranks, zero_stage=stage, ep=1, accumulation=4 // ranks)

    # DeepSpeed keeps the groups of an earlier trial, whose ranks divide the experts.
    build(warm_slots(2), _experts(tmp_path, 2, zero_stage=stage, ep=2), tmp_path)
    first = drive(warm_slots(2), settings(2), tmp_path, persist=True)
    on_one = resharded(warm_slots(1), settings(1), tmp_path / "one", first)
    on_two = resharded(warm_slots(2), settings(2), tmp_path / "two", on_one)

    stored = [files(tmp_path, run.checkpoints[-1]) for run in (first, on_one, on_two)]
    weights = [export_weights(each) for each in stored]
    assert sum("deepspeed_experts" in name for name in weights[0]) == 4
    assert differing(weights[0], weights[1]) == []
    expected, seen = shards(stored[0]), shards(stored[2])
    assert len(expected) >= 12
    assert differing(expected, seen) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("saved", "now", "reason"),
    [
        ({"zero_stage": 1, "ep": 2}, {"zero_stage": 1, "ep": 1}, "saved with an ep_size > 1"),
        ({"zero_stage": 0, "ep": 2}, {"zero_stage": 0, "ep": 1}, "saved with an ep_size > 1"),
        ({"zero_stage": 1, "ep": 1}, {"zero_stage": 0, "ep": 1}, "saved with ZeRO"),
        ({"zero_stage": 0, "ep": 1}, {"zero_stage": 1, "ep": 1}, "saved without ZeRO"),
    ],
)
def test_experts_that_cannot_be_resharded(
    warm_slots: Warm, tmp_path: Path, saved: dict[str, Any], now: dict[str, Any], reason: str
) -> None:
    """The error says how the checkpoint was saved."""
    two = _experts(tmp_path, 2, accumulation=2, **saved)
    first = drive(warm_slots(2), two, tmp_path, persist=True)
    one = _experts(tmp_path, 1, accumulation=4, **now)
    with pytest.raises(RankFailed, match=reason):
        resharded(warm_slots(1), one, tmp_path / "one", first)


def _experts(folder: Path, ranks: int, **hparams: Any) -> ExperimentConfig:
    return toy_config(
        folder, 3, entrypoint="engine_trials:Experts",
        reproducibility={"experiment_seed": ranks}, hyperparameters=hparams,
    )  # fmt: skip


def shards(stored: Path) -> dict[str, torch.Tensor]:
    """The tensors of all engines, without the ranks' own states."""
    return {name: each for name, each in tensors(stored).items() if name.startswith("model")}
