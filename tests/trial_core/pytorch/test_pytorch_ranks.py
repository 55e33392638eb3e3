"""Ranks of a PyTorchTrial together: hooks, validation, precision, one trial after another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.slots import TOY, ExperimentConfig, drive, lines, toy_config
from trial_core.processes.slots.slot_group import SlotGroup

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]


def small(folder: Path, name: str, batches: int, **fields: Any) -> tuple[ExperimentConfig, Path]:
    """An experiment with a trial of `pytorch_state_trials`, and the folder of its run."""
    hparams = {"global_batch_size": 4, "record": str(folder), **fields.pop("hparams", {})}
    config = toy_config(
        folder,
        batches,
        entrypoint=f"pytorch_state_trials:{name}",
        hyperparameters=hparams,
        **fields,
    )
    return config, folder


def test_hooks_find_and_change_the_state(warm_slots: Warm, tmp_path: Path) -> None:
    """By the reference's names. What a hook changes or removes counts; the chief alone writes."""
    slots = warm_slots(2)
    first = drive(slots, *small(tmp_path, "Hooked", 2), persist=True)
    drive(slots, *small(tmp_path, "Hooked", 3), resume=first)
    stored = tmp_path / "checkpoints/checkpoints" / first.checkpoints[-1] / "state_dict.pth"
    state = torch.load(stored, weights_only=True)
    assert state["models_state_dict"][1]["bias"].tolist() == [5.0]
    for rank in (0, 1):
        assert lines(tmp_path, "saved", rank) == [
            {"models_state_dict": 2, "optimizers_state_dict": 2, "lr_schedulers_state_dict": 4,
             "scaler_state_dict": 5}
        ] * 2  # fmt: skip
        assert lines(tmp_path, "loaded", rank) == [[5.0]]
        (_, before), (bias, optimizer_state) = lines(tmp_path, "started", rank)
        assert (before, bias, optimizer_state) == (0, [7.0], 0)
    assert lines(tmp_path, "written", 0) == [["state_dict.pth", "trialflow"]] * 2
    assert lines(tmp_path, "written", 1) == []


def test_the_whole_set_on_one_rank(warm_slots: Warm, tmp_path: Path) -> None:
    """evaluate_full_dataset gets all samples, unsharded. Training metrics of rank 0 alone."""
    run = drive(
        warm_slots(2),
        *small(tmp_path, "FullDataset", 3, optimizations={"average_training_metrics": False}),
    )
    assert run.training[-1] == {"loss": 10.0}
    assert run.validation[-1] == {"loss": float(sum(range(12)))}
    assert lines(tmp_path, "validated", 0)[-1] == list(range(12))
    assert lines(tmp_path, "validated", 1) == []


@pytest.mark.parametrize(
    ("trial", "unused"),
    [
        ("Scaled", True),
        pytest.param("Scaled", False, marks=pytest.mark.long),
        ("ScaledAtTimes", True),
    ],
)
def test_all_ranks_skip_a_step_that_one_must_skip(
    warm_slots: Warm, tmp_path: Path, trial: str, unused: bool
) -> None:
    """A trial's own scaler has seen infinite gradients on one rank: all scales are halved.

    A rank without a gradient takes part, too.
    """
    drive(warm_slots(2), *small(tmp_path, trial, 3, hparams={"unused": unused}))
    assert [lines(tmp_path, "scale", rank) for rank in (0, 1)] == [[16.0, 8.0, 16.0]] * 2
    weights = [torch.load(tmp_path / f"weights-{rank}.pt")[0] for rank in (0, 1)]
    for name, weight in weights[0].items():
        assert torch.isfinite(weight).all()
        assert torch.equal(weight, weights[1][name])


def test_warm_ranks_train_trials_of_both_kinds(warm_slots: Warm, tmp_path: Path) -> None:
    """One after the other, and nothing of earlier ones is left in memory."""
    slots = warm_slots(2)
    for entrypoint in ("pytorch_state_trials:Successive", "toy_trial:ToyTrial") * 2:
        hparams = {"global_batch_size": 4}
        config = toy_config(tmp_path, 2, entrypoint=entrypoint, hyperparameters=hparams)
        run = drive(slots, config, tmp_path)
        assert run.progress.batches_trained == 2
        assert run.training[-1].get("left", 0.0) == 0.0


WITHOUT_DEEPSPEED = """
import json, os, sys

sys.path.insert(0, os.environ["TOY"])
os.chdir(os.environ["TOY"])
import deepspeed.comm.comm
import torch.distributed
from trial_core.rank.trial.context import RunInfo
from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.trainer.entrypoint import build_adapter

experiment = {"entrypoint": "pytorch_trials:Small"}
adapter = build_adapter(RunInfo("toy-1", experiment), DistributedContext.from_environment())
print(json.dumps({
    "torch": torch.distributed.is_initialized(),
    "deepspeed": deepspeed.comm.comm.cdb is not None,
    "operators": [name for name in sys.modules if "deepspeed_shm_comm" in name],
}), flush=True)
"""


@pytest.mark.long
def test_deepspeed_does_not_run_in_ranks_of_a_pytorch_trial() -> None:
    """Neither its communication nor a compiled operator of it."""
    for outcome in run_ranks(WITHOUT_DEEPSPEED, 2, TOY=str(TOY)):
        assert outcome == {"torch": True, "deepspeed": False, "operators": []}
