"""Trials with one mistake each."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import Any

import deepspeed
import torch
from toy_trial import ToyTrial, samples

from trial_core.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext
from trial_core.pytorch import DataLoader


class NotATrial:
    """Has the right methods, perhaps, but not the right base."""


class Unfinished(DeepSpeedTrial):
    """Leaves out what every trial must define."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context


class NoEngine(ToyTrial):
    """Builds nothing to train."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.record = None


class RefusedBatchSize(ToyTrial):
    """Batch sizes that do not multiply."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        model = torch.nn.Linear(2, 1)
        deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config={
                "train_batch_size": 7,
                "train_micro_batch_size_per_gpu": 2,
                "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
            },
        )


class ForgetsToStep(ToyTrial):
    """Never runs an optimizer step."""

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        inputs, index = next(dataloader_iter)
        return {"loss": self._loss(inputs, index)}


class EmptyTraining(ToyTrial):
    """Trains on nothing."""

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(samples(3), batch_size=4, drop_last=True)


class PlainLoader(ToyTrial):
    """Returns a loader that does not shard."""

    def build_training_data_loader(self) -> Any:
        return torch.utils.data.DataLoader(samples(8))


class RaisesInEvaluation(ToyTrial):
    """A mistake of the user's own."""

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        raise KeyError("accuracy")


class Forks(ToyTrial):
    """Leaves a child behind, as data loaders with workers do."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)


class TalksNonsense(ToyTrial):
    """Writes into its rank's connection."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                connection = socket.socket(fileno=os.dup(descriptor))
                if str(connection.getpeername()).endswith("/channel"):
                    connection.sendall((4).to_bytes(4, "big") + b"gibb")


class RaisesASurrogate(ToyTrial):
    """Fails over a file whose name is no text."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        raise ValueError("no file " + os.fsdecode(b"\xff"))
