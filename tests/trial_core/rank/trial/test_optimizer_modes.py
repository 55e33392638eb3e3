"""Optimizers with train and eval modes, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.slots import Driven, drive, lines, toy_config
from tests.support.tensors import differing, tensors
from tests.trial_core.deepspeed.resuming import saved_again
from trial_core.checkpoint.weights.weights import SavedWeight
from trial_core.config import ExperimentConfig
from trial_core.deepspeed.checkpoint_engine import CHECKPOINT_CLASSES
from trial_core.deepspeed.export.engine_weights import checked_weights, saved_weights
from trial_core.processes.slots.slot_group import SlotGroup
from trial_core.rank.state_files.safe_load import Reader

ENGINE = "two_mode_trials:TwoModesEngine"
Warm = Callable[[int], SlotGroup]


def run(
    slots: SlotGroup, folder: Path, batches: int, resume: Driven | None = None, **changes: Any
) -> Driven:
    return drive(slots, config(folder, batches, **changes), folder, resume=resume, persist=True)


def config(folder: Path, batches: int, **changes: Any) -> ExperimentConfig:
    folder.mkdir(exist_ok=True)
    hparams = {"record": str(folder), "global_batch_size": 4, **changes.pop("hparams", {})}
    return toy_config(
        folder, batches, entrypoint=changes.pop("entrypoint", "two_mode_trials:TwoModes"),
        scheduling_unit=4, min_checkpoint_period={"batches": 4},
        min_validation_period=changes.pop("validations", {"batches": 3}),
        checkpoint_policy="none", hyperparameters=hparams, **changes,
    )  # fmt: skip


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


def run_engine(
    slots: SlotGroup, folder: Path, batches: int, resume: Driven | None = None, **changes: Any
) -> Driven:
    return run(slots, folder, batches, resume, entrypoint=ENGINE, **changes)


def weights(folder: Path, what: Callable[..., dict[str, SavedWeight]]) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint of an engine, in fp32."""
    reader = Reader(classes=CHECKPOINT_CLASSES)
    return {name: each.read() for name, each in what(folder, 0, "fp32", reader).items()}


def validated(folder: Path) -> dict[str, torch.Tensor]:
    """The weights that the engine's last validation saw."""
    return {name: torch.tensor(each) for name, each in lines(folder, "validated", 0)[-1].items()}


MODES = [
    pytest.param({"zero_stage": 0}, marks=pytest.mark.long),
    pytest.param({"zero_stage": 1}, marks=pytest.mark.long),
    pytest.param({"zero_stage": 1, "precision": "bf16"}, marks=pytest.mark.long),
    {"zero_stage": 2, "precision": "bf16"},
    pytest.param({"zero_stage": 2, "precision": "bf16", "switches": True}, marks=pytest.mark.long),
    pytest.param({"zero_stage": 1, "precision": "bf16", "averages": True}, marks=pytest.mark.long),
]


@pytest.mark.slots
@pytest.mark.parametrize("hparams", MODES)
def test_the_validated_weights_are_an_engines_export(
    warm_slots: Warm, tmp_path: Path, hparams: dict[str, Any]
) -> None:
    """An export and an evaluation have the validated weights, and a resumed run those of training:
    it is the uninterrupted one. Validations do not change training."""
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    driven = run_engine(warm_slots(2), parts, 4, hparams=hparams)
    saved, seen = stored(parts, driven), validated(parts)
    assert differing(weights(saved, checked_weights), seen) == []
    assert sorted(differing(weights(saved, saved_weights), seen)) == sorted(seen)
    of = config(parts, 4, entrypoint=ENGINE, hparams=hparams)
    loaded = saved_again(warm_slots(2), driven, of, parts, "weights")
    of_module = tensors(Path(loaded[0].staging))
    for name, each in seen.items():
        module = of_module[f"model0/mp_rank_00_model_states.pt/module/{name}"]
        assert torch.equal(module.float(), each)
    every = {"batches": 3 if hparams.get("switches") else 8}  # a trial's own switching rounds
    resumed = stored(parts, run_engine(warm_slots(2), parts, 8, driven, hparams=hparams))
    at_once = stored(whole, run_engine(warm_slots(2), whole, 8, hparams=hparams, validations=every))
    assert differing(tensors(at_once), tensors(resumed)) == []


@pytest.mark.long
@pytest.mark.slots
def test_an_engine_with_modes_resumes_on_another_number_of_ranks(
    warm_slots: Warm, tmp_path: Path
) -> None:
    """Its optimizer continues in training mode, from the trained weights."""
    hparams = {"zero_stage": 1, "batch_size": 4}
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    driven = run_engine(warm_slots(2), parts, 4, hparams=hparams)
    resumed = stored(parts, run_engine(warm_slots(1), parts, 8, driven, hparams=hparams))
    at_once = stored(whole, run_engine(warm_slots(2), whole, 8, hparams=hparams))
    expected = weights(at_once, checked_weights)
    for name, each in weights(resumed, checked_weights).items():
        torch.testing.assert_close(each, expected[name])


@pytest.mark.long
@pytest.mark.slots
@pytest.mark.parametrize(
    "hparams", [{"zero_stage": 3}, {"zero_stage": 0, "precision": "bf16"}], ids=str
)
def test_an_engine_whose_weights_would_not_be_switched_is_refused(
    warm_slots: Warm, tmp_path: Path, hparams: dict[str, Any]
) -> None:
    """Before training, with the stages that can."""
    with pytest.raises(Exception, match="ScheduleFreeSGD has train and eval modes, which a Deep"):
        run_engine(warm_slots(1), tmp_path, 4, hparams=hparams)
