"""Names of DeepSpeedTrial that nothing of ours calls, but that trials may."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch

from trial_core.controller.controller import Controller
from trial_core.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext


class Small(DeepSpeedTrial):
    """No more than must be."""

    def __init__(self, context: DeepSpeedTrialContext | None = None) -> None:
        pass

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        return {}

    def build_training_data_loader(self) -> None:
        pass

    def build_validation_data_loader(self) -> None:
        pass


class Graphs(Small):
    """Batches of a type of its own."""

    def get_batch_length(self, batch: Any) -> int:
        return int(batch["graphs"])


def test_the_controller_is_found_on_classes_and_instances() -> None:
    """As in the reference, it is an attribute of the class."""
    assert DeepSpeedTrial.trial_controller_class is Controller
    assert Small().trial_controller_class is Controller


def test_asking_for_the_controller_first_meets_no_cycle() -> None:
    """In a fresh interpreter that has imported nothing but the trial."""
    code = "from trial_core.deepspeed import DeepSpeedTrial as T; print(T.trial_controller_class)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "trial_core.controller.controller.Controller" in run.stdout


def test_the_length_of_a_batch_may_be_the_trials_own_matter() -> None:
    """The default looks for a tensor; an override counts as it likes."""
    assert Small().get_batch_length({"x": torch.ones(3, 2)}) == 3
    assert Graphs().get_batch_length({"graphs": 4}) == 4
