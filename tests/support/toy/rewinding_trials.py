"""A toy trial that changes the state it resumes from."""

from __future__ import annotations

import json
from typing import Any

import torch
from toy_trial import ToyTrial

from trial_core.pytorch import PyTorchCallback

SEED = 7


class Rewind(PyTorchCallback):
    """When a checkpoint is loaded, restarts the data, reseeds torch, and drops its own state."""

    def __init__(self) -> None:
        self.restored = False

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["training_data"]["drawn"] = 0
        checkpoint["rng"]["torch"] = torch.Generator().manual_seed(SEED).get_state()
        del checkpoint["callbacks"]

    def state_dict(self) -> dict[str, Any]:
        return {"restored": True}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.restored = state_dict["restored"]


class RewindTrial(ToyTrial):
    """Records in every batch torch's seed, and whether its callback was restored."""

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        self.rewind = Rewind()
        return {"rewind": self.rewind}

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        with self._file("state").open("a") as file:
            file.write(json.dumps([torch.initial_seed(), self.rewind.restored]) + "\n")
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)
