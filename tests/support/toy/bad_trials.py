"""Trials with one mistake each."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from parallel_trials import PipelineTrial, ds_config, pipeline
from toy_trial import ToyTrial, samples

from trial_core.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext
from trial_core.pytorch import DataLoader


class NotATrial:
    """Has the wrong base class."""


class Unfinished(DeepSpeedTrial):
    """Does not define the abstract methods."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context


class NoEngine(ToyTrial):
    """Wraps no engine."""

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


class StepsOnce(ToyTrial):
    """Of two calls for one batch, only the first one runs a step."""

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        if self.engine.micro_steps > 2 * batch_idx:
            return {"loss": 0.0, "rank": 0.0}
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)


class ReturnsNothing(ToyTrial):
    """Skips the second call for a batch, and returns nothing."""

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        if self.engine.micro_steps == 0:
            return super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        return None


class EmptyTraining(ToyTrial):
    """Its training loader is empty."""

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(samples(3), batch_size=4, drop_last=True)


class PlainLoader(ToyTrial):
    """Returns a loader that does not shard."""

    def build_training_data_loader(self) -> Any:
        return torch.utils.data.DataLoader(samples(8))


class UnequalEngines(ToyTrial):
    """A second engine with larger micro-batches than the first."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        model = torch.nn.Linear(2, 2)
        larger = {**self.hparams, "micro_batch_size": self.hparams["micro_batch_size"] + 3}
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=ds_config(larger)
        )
        context.wrap_model_engine(engine)


class LatePipeline(ToyTrial):
    """A pipeline after another kind of engine."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        context.wrap_model_engine(pipeline(self.hparams, stages=2))


class UnequalPipelines(PipelineTrial):
    """A pipeline of two stages, and one of one stage."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        context.wrap_model_engine(pipeline(self.hparams, stages=1))


class DuplicateMetricName(ToyTrial):
    """Gives a reducer the name of a metric that train_batch returns."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        context.wrap_reducer(len, name="loss", for_validation=False)


class NoTrainingLoader(ToyTrial):
    """Returns no loader on a rank that needs data."""

    def build_training_data_loader(self) -> Any:
        return None


class OverridesSave(ToyTrial):
    """Overrides save, and neither load nor load_weights."""

    def save(self, context: DeepSpeedTrialContext, path: Path) -> None:
        torch.save(self.engine.module.state_dict(), path / "weights.pt")


class SavesUnderATakenName(ToyTrial):
    """Its checkpoints have a file with the manifest's name."""

    def save(self, context: DeepSpeedTrialContext, path: Path) -> None:
        super().save(context, path)
        (path / "manifest.json").write_text("{}")


class RaisesInEvaluation(ToyTrial):
    """Raises an exception of a class that it defines."""

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        raise KeyError("accuracy")


class Forks(ToyTrial):
    """Leaves a child process behind, as data loaders with workers do."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)


class TalksNonsense(ToyTrial):
    """Writes invalid data into its rank's connection."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                connection = socket.socket(fileno=os.dup(descriptor))
                if str(connection.getpeername()).endswith("/channel"):
                    connection.sendall((4).to_bytes(4, "big") + b"gibb")


class RaisesASurrogate(ToyTrial):
    """Raises an error about a file name that is not valid text."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        raise ValueError("no file " + os.fsdecode(b"\xff"))
