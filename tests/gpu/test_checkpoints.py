"""What a checkpoint of a GPU's state has, and that training from it is the same, bit by bit.

Collected with ``DS_ACCELERATOR=cuda`` alone. One NVIDIA GPU is enough.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.slots import Driven, build, drive, toy_config
from tests.support.tensors import differing, tensors
from trial_core.messages import (
    BuildLoadersAndRestore,
    Done,
    PersistCheckpoint,
    Persisted,
    ReadyToTrain,
    ReleaseStaging,
    SaveCheckpoint,
    Saved,
    TrainBatches,
    Trained,
)
from trial_core.processes.slots.slot_group import SlotGroup

pytestmark = [
    pytest.mark.slots,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is not for CUDA"),
]
Warm = Callable[[int], SlotGroup]

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}


@pytest.mark.parametrize("snapshot", ["eager", "lazy"])
@pytest.mark.parametrize("precision", [{}, BF16, FP16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("zero_stage", range(4))
def test_a_snapshot_is_of_its_batch_though_training_goes_on(
    warm_slots: Warm, tmp_path: Path, zero_stage: int, precision: dict[str, Any], snapshot: str
) -> None:
    """The copies from the device have ended before the next step changes what they copy. The first
    lazy one is made at once, and compared."""
    zero = {"stage": zero_stage, **({"overlap_comm": True} if zero_stage else {})}
    hparams = {"layers": 32, "ds_config": {"zero_optimization": zero, **precision}}

    def saved(name: str, trained_on: int) -> dict[str, torch.Tensor]:
        config = toy_config(
            tmp_path, entrypoint="gpu_trials:Wide", hyperparameters=hparams,
            checkpointing={"snapshot": snapshot, "verify_first": False},
        )  # fmt: skip
        slots = warm_slots(1)
        build(slots, config, tmp_path)
        slots.request(BuildLoadersAndRestore(batches_trained=0, checkpoint=None), ReadyToTrain)
        for until, uuid in ((2, f"before-{name}"), (3, name)):
            slots.request(TrainBatches(until=until), Trained)
            slots.request(SaveCheckpoint(uuid=uuid), Saved)
            if uuid != name:
                slots.request(PersistCheckpoint(uuid=uuid), Persisted)
                slots.request(ReleaseStaging(uuid=uuid), Done)
        if trained_on:
            (trained,) = slots.request(TrainBatches(until=3 + trained_on), Trained)
            assert (trained.copy_seconds > 0) is (snapshot == "lazy")
        slots.request(PersistCheckpoint(uuid=name), Persisted)
        slots.request(ReleaseStaging(uuid=name), Done)
        return tensors(tmp_path / "checkpoints" / "checkpoints" / name)

    at_once, later = saved("at-once", 0), saved("later", 5)
    assert len(at_once) > 32
    assert differing(at_once, later) == []


@pytest.mark.parametrize(
    ("trial", "hparams"),
    [
        pytest.param(
            "engine_trials:OwnConfig",
            # Overflows: half of the first 30 steps are skipped, and each halves the scale.
            {"ds_config": {"fp16": {"enabled": True, "initial_scale_power": 32, "hysteresis": 1}}},
            id="fp16 with skipped steps",
        ),
        pytest.param("gpu_trials:Amp", {"scaler": False}, id="PyTorchTrial, context's scaler"),
        pytest.param("gpu_trials:Amp", {"scaler": True}, id="PyTorchTrial, own scaler"),
    ],
)
def test_mixed_precision_resumes_bit_identically(
    warm_slots: Warm, tmp_path: Path, trial: str, hparams: dict[str, Any]
) -> None:
    """The loss scale is restored, too: 30 batches equal 14 + 16."""

    def run(part: str, batches: int, resume: Driven | None = None) -> Driven:
        config = toy_config(
            tmp_path / part, batches, entrypoint=trial, scheduling_unit=1,
            min_validation_period={"batches": 14}, hyperparameters=hparams,
        )  # fmt: skip
        (tmp_path / part).mkdir(exist_ok=True)
        return drive(warm_slots(1), config, tmp_path / part, resume=resume, persist=True)

    whole, first = run("straight", 30), run("parts", 14)
    rest = run("parts", 30, first)
    assert rest.training == whole.training[14:]
    folders = [
        tmp_path / part / "checkpoints" / "checkpoints" / each.checkpoints[-1]
        for part, each in (("straight", whole), ("parts", rest))
    ]
    expected, seen = map(tensors, folders)
    assert len(expected) > 4
    assert differing(expected, seen) == []
    if "ds_config" in hparams:
        (states,) = folders[1].rglob("*model_states.pt")
        assert 0 < torch.load(states, weights_only=False)["skipped_steps"] < 30
