"""The trial that trialflow trains: the engine of `with_deepspeed`, in a DeepSpeedTrial."""

from __future__ import annotations

from typing import Any

import deepspeed
from torch.utils.data import Subset

from benchmarks.goodput.with_deepspeed import config
from benchmarks.goodput.workload import (
    MICRO_BATCH_SAMPLES,
    Job,
    Recorder,
    dataset,
    new_model,
)
from trial_core.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext
from trial_core.pytorch import DataLoader


class GoodputTrial(DeepSpeedTrial):
    """Trains the engine, and notes each batch."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.model = new_model()
        engine, *_ = deepspeed.initialize(
            model=self.model, model_parameters=self.model.parameters(), config=config(Job.given())
        )
        self.engine = context.wrap_model_engine(engine)
        self.recorder: Recorder | None = None

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        if self.recorder is None:
            self.recorder = Recorder(Job.given(), self.context.distributed.get_rank(), batch_idx)
        (batch,) = self.context.to_device(next(dataloader_iter))  # a micro-batch
        loss = self.engine(batch)
        self.engine.backward(loss)
        is_last = self.engine.is_gradient_accumulation_boundary()
        self.engine.step()
        if is_last:
            self.recorder.batch_ended(self.model)
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        (batch,) = self.context.to_device(next(dataloader_iter))
        return {"loss": self.engine(batch)}

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(dataset(), batch_size=MICRO_BATCH_SAMPLES, shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        few = Subset(dataset(), range(Job.given().batch_samples))
        return DataLoader(few, batch_size=MICRO_BATCH_SAMPLES)
