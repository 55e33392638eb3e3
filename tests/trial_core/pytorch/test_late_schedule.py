"""A schedule that a trial wraps where it builds its data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.slots import drive, toy_config
from trial_core.config import ExperimentConfig
from trial_core.processes.slots.slot_group import SlotGroup


@pytest.mark.slots
def test_a_late_schedule_is_compared(
    warm_slots: Callable[[int], SlotGroup], tmp_path: Path
) -> None:
    """A changed constant counts in a resumed run, as that of a schedule of ``__init__`` does."""
    slots = warm_slots(1)

    def config(batches: int, gamma: float) -> ExperimentConfig:
        return toy_config(
            tmp_path, batches, entrypoint="settings_trials:DecayingLate",
            hyperparameters={"lr": 0.5, "gamma": gamma},
        )  # fmt: skip

    first = drive(slots, config(2, 0.5), tmp_path, persist=True)
    rest = drive(slots, config(4, 0.9), tmp_path, resume=first, persist=True)
    stored = tmp_path / "checkpoints" / "checkpoints" / rest.checkpoints[-1] / "state_dict.pth"
    group = torch.load(stored)["optimizers_state_dict"][0]["param_groups"][0]
    assert group["lr"] == pytest.approx(0.5 * 0.9**4)
