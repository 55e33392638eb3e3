"""Optimizers with train and eval modes, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.slots import Driven, drive, lines, toy_config
from tests.support.tensors import differing, tensors
from trial_core.processes.slots.slot_group import SlotGroup

Warm = Callable[[int], SlotGroup]


def run(
    slots: SlotGroup, folder: Path, batches: int, resume: Driven | None = None, **changes: Any
) -> Driven:
    folder.mkdir(exist_ok=True)
    hparams = {"record": str(folder), "global_batch_size": 4, **changes.pop("hparams", {})}
    of = toy_config(
        folder, batches, entrypoint=changes.pop("entrypoint", "two_mode_trials:TwoModes"),
        scheduling_unit=4, min_checkpoint_period={"batches": 4},
        min_validation_period=changes.pop("validations", {"batches": 3}),
        checkpoint_policy="none", hyperparameters=hparams, **changes,
    )  # fmt: skip
    return drive(slots, of, folder, resume=resume, persist=True)


def stored(folder: Path, driven: Driven) -> Path:
    return folder / "checkpoints" / "checkpoints" / driven.checkpoints[-1]


@pytest.mark.slots
def test_the_validated_weights_are_the_checkpoints_model(warm_slots: Warm, tmp_path: Path) -> None:
    """A resumed run is the uninterrupted one, and validations do not change training."""
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    driven = run(warm_slots(2), parts, 4)
    saved = torch.load(stored(parts, driven) / "state_dict.pth", weights_only=True)
    validated, trained = saved["models_state_dict"][0], saved["training_weights"][0]
    assert lines(parts, "validated", 0)[-1] == float(validated["0.weight"].sum())
    assert sorted(differing(validated, trained)) == ["0.bias", "0.weight"]
    resumed = stored(parts, run(warm_slots(2), parts, 8, driven))
    unvalidated = stored(whole, run(warm_slots(2), whole, 8, validations={"batches": 8}))
    assert differing(tensors(unvalidated), tensors(resumed)) == []


@pytest.mark.long
@pytest.mark.slots
def test_a_trial_may_switch_the_modes_itself(warm_slots: Warm, tmp_path: Path) -> None:
    """A resumed run is the uninterrupted one; validations see the checkpoint's model."""
    parts, whole, hparams = tmp_path / "parts", tmp_path / "whole", {"switches": True}
    driven = run(warm_slots(2), parts, 4, hparams=hparams)
    saved = torch.load(stored(parts, driven) / "state_dict.pth", weights_only=True)
    seen = float(saved["models_state_dict"][0]["0.weight"].sum())
    assert lines(parts, "validated", 0)[-1] == pytest.approx(seen, rel=1e-12)
    resumed = stored(parts, run(warm_slots(2), parts, 8, driven, hparams=hparams))
    at_once = stored(whole, run(warm_slots(2), whole, 8, hparams=hparams))
    assert differing(tensors(at_once), tensors(resumed)) == []


@pytest.mark.long
@pytest.mark.slots
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_deepspeeds_copies_of_the_weights_are_refused(
    warm_slots: Warm, tmp_path: Path, zero_stage: int
) -> None:
    """Switching the optimizer would not switch the engine's weights."""
    hparams = {"zero_stage": zero_stage}
    with pytest.raises(Exception, match="ScheduleFreeSGD has train and eval modes, but DeepSpeed"):
        run(
            warm_slots(1), tmp_path, 4, entrypoint="two_mode_trials:TwoModesEngine", hparams=hparams
        )
