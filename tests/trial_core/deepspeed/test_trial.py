"""Members of DeepSpeedTrial that only trials use."""

from __future__ import annotations

from typing import Any

import torch

from trial_core.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext
from trial_core.rank.controller import Controller


class Small(DeepSpeedTrial):
    """Defines only the abstract methods."""

    def __init__(self, context: DeepSpeedTrialContext | None = None) -> None:
        pass

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        return {}

    def build_training_data_loader(self) -> None:
        pass

    def build_validation_data_loader(self) -> None:
        pass


class Graphs(Small):
    """Has batches of a type that it defines."""

    def get_batch_length(self, batch: Any) -> int:
        return int(batch["graphs"])


def test_the_controller_is_an_attribute_of_class_and_instance() -> None:
    """As in the reference."""
    assert DeepSpeedTrial.trial_controller_class is Controller
    assert Small().trial_controller_class is Controller


def test_a_trial_may_override_get_batch_length() -> None:
    """The default is the length of the first tensor."""
    assert Small().get_batch_length({"x": torch.ones(3, 2)}) == 3
    assert Graphs().get_batch_length({"graphs": 4}) == 4
