"""A resumed PyTorchTrial is the uninterrupted one, and checkpoints fit other numbers of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.slots import ONE_TWO_FOUR, Driven, drive, lines, toy_config
from tests.support.tensors import differing, tensors
from tests.trial_core.deepspeed.resuming import assert_resuming_is_bit_identical, saved_again
from trial_core.config import ExperimentConfig
from trial_core.processes.slots.slot_group import SlotGroup

pytestmark = pytest.mark.slots
Warm = Callable[[int], SlotGroup]
EVERYTHING = "pytorch_state_trials:Everything"
STATE = "state_dict.pth"


@pytest.mark.parametrize("world_size", ONE_TWO_FOUR)
def test_resuming_between_two_optimizer_steps(
    warm_slots: Warm, tmp_path: Path, world_size: int
) -> None:
    """Weights, buffers, optimizers, schedulers, loss scale, callbacks and added-up gradients.

    Steps follow batches 3, 6 and 9; the checkpoint is of batch 4. Ranks have different numbers of
    validation batches, and equal running means in them. ``torch.load`` reads the state safely.
    """
    stored = assert_resuming_is_bit_identical(
        warm_slots(world_size), tmp_path, EVERYTHING, {"aggregation_frequency": 3},
        global_batch_size=4 * world_size, shuffle=True, validation_samples=4 * world_size + 2,
    )  # fmt: skip
    seen = [lines(tmp_path / "parts", "buffers", rank) for rank in range(world_size)]
    assert [len(each) for each in seen] == [9] + [6] * (world_size - 1)
    assert {str(each[:2]) for each in seen} == {str(seen[0][:2])}
    state = torch.load(stored / STATE, weights_only=True)
    assert {name: len(value) for name, value in state.items()} == {
        "models_state_dict": 2, "optimizers_state_dict": 2, "lr_schedulers_state_dict": 4,
        "scaler_state_dict": 5,
    }  # fmt: skip
    adam, sgd = (each["param_groups"][0]["lr"] for each in state["optimizers_state_dict"])
    assert adam < 0.01
    assert sgd < 0.05 * 0.1 * 0.1


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_gan_resumes_with_the_gradients_that_it_keeps(
    warm_slots: Warm, tmp_path: Path, world_size: int
) -> None:
    """Those of the generator's loss in the discriminator differ from rank to rank."""
    run = _run(tmp_path / "whole", 4, world_size, "pytorch_trials:Gan")
    expected = drive(warm_slots(world_size), *run, persist=True)
    first = drive(
        warm_slots(world_size),
        *_run(tmp_path / "parts", 2, world_size, "pytorch_trials:Gan"),
        persist=True,
    )
    rest = drive(
        warm_slots(world_size), *_run(tmp_path / "parts", 4, world_size, "pytorch_trials:Gan"),
        resume=first, persist=True,
    )  # fmt: skip
    seen = [_stored(tmp_path / part, run) for part, run in (("whole", expected), ("parts", rest))]
    assert sum(name.startswith("gradients") for name in seen[0]) >= 4 * world_size
    assert differing(*seen) == []


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 4])
def test_another_number_of_ranks_and_back(
    warm_slots: Warm, tmp_path: Path, world_size: int
) -> None:
    """Weights, optimizers, schedulers and scaler are those that two ranks have saved."""
    saved = drive(warm_slots(2), *_run(tmp_path, 4, 2), persist=True)
    elsewhere = _restored(warm_slots(world_size), saved, _run(tmp_path, 4, world_size))
    back = _restored(warm_slots(2), saved, _run(tmp_path, 4, 2))
    assert len(elsewhere) > 40
    assert differing(elsewhere, back) == []


@pytest.mark.parametrize("restore", ["weights", pytest.param("state", marks=pytest.mark.long)])
def test_a_warm_start(warm_slots: Warm, tmp_path: Path, restore: Any) -> None:
    """Begins with another trial's models alone, or also with all that changes them."""
    saved = drive(warm_slots(2), *_run(tmp_path, 4, 2), persist=True)
    begun = _restored(warm_slots(2), saved, _run(tmp_path, 4, 2), restore=restore)
    before = {name: each for name, each in _stored(tmp_path, saved).items() if STATE in name}
    models = {name: each for name, each in before.items() if "models_state_dict" in name}
    assert len(models) == 9
    assert not any(
        "state/" in name for name in begun if "optimizers" in name and restore == "weights"
    )
    expected = before if restore == "state" else models
    assert differing(expected, {name: begun[name] for name in expected}) == []
    assert (begun.keys() == before.keys()) == (restore == "state")


def _run(
    folder: Path, batches: int, world_size: int, entrypoint: str = EVERYTHING
) -> tuple[ExperimentConfig, Path]:
    folder.mkdir(exist_ok=True)
    config = toy_config(
        folder, batches, entrypoint=entrypoint, resources={"slots_per_trial": world_size},
        optimizations={"aggregation_frequency": 1 if "Gan" in entrypoint else 3},
        hyperparameters={"global_batch_size": 8},
    )  # fmt: skip
    return config, folder


def _stored(folder: Path, run: Driven) -> dict[str, torch.Tensor]:
    return tensors(folder / "checkpoints" / "checkpoints" / run.checkpoints[-1])


def _restored(
    slots: SlotGroup, saved: Driven, run: tuple[ExperimentConfig, Path], **restore: Any
) -> dict[str, torch.Tensor]:
    """The state that a trial saves again, right after it has loaded what `saved` has saved."""
    again = saved_again(slots, saved, *run, **restore)
    return {name: each for name, each in tensors(Path(again[0].staging)).items() if STATE in name}
