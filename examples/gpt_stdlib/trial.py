"""Trains a byte-level GPT on the source code of Python's standard library."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import deepspeed
from data import Days, Windows, baselines, load_text
from deepspeed.accelerator import get_accelerator
from model import GPT, GPTConfig, next_byte_loss
from torch import Tensor

from trial_core.deepspeed import (
    DeepSpeedTrial,
    DeepSpeedTrialContext,
    overwrite_deepspeed_config,
)
from trial_core.pytorch import DataLoader, PyTorchCallback

logger = logging.getLogger(__name__)


class GPTTrial(DeepSpeedTrial):
    """One engine that learns to predict the next byte."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.hparams = context.get_hparams()
        text = load_text(days=Days.from_config(context.get_data_config()))
        window = self.hparams["window"]
        self.text = text.training
        self.training = Windows(self.text, window)
        self.validation = Windows(text.validation, window, self.hparams["validation_windows"])
        model = GPT(GPTConfig.from_hparams(self.hparams))
        context.set_work_per_sample(tokens=window, flops=model.training_flops())
        engine, _, _, _ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=self._deepspeed_config()
        )
        self.engine = context.wrap_model_engine(engine)

    def _deepspeed_config(self) -> dict[str, Any]:
        """ds_config.json, with bf16 where the device supports it and the run's number of steps."""
        length = self.context.get_experiment_config()["searcher"]["max_length"]["batches"]
        accelerator = get_accelerator()
        has_bf16 = accelerator.device_name() != "cpu" and accelerator.is_bf16_supported()
        base = overwrite_deepspeed_config(
            str(Path(__file__).with_name(self.hparams["deepspeed_config"])),
            {
                "bf16": {"enabled": has_bf16},
                "scheduler": {"params": {"total_num_steps": length}},
            },
        )
        return overwrite_deepspeed_config(base, self.hparams["overwrite_deepspeed_args"])

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(
            self.training, batch_size=self.engine.train_micro_batch_size_per_gpu(), shuffle=True
        )

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(self.validation, batch_size=32)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss = self._loss(dataloader_iter)
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        loss = self._loss(dataloader_iter)
        return {"validation_loss": loss, "bits_per_byte": loss / math.log(2)}

    def _loss(self, dataloader_iter: Any) -> Tensor:
        """The loss on the next micro-batch, in nats per byte."""
        windows = self.context.to_device(next(dataloader_iter)).long()
        return next_byte_loss(self.engine(windows[:, :-1]), windows[:, 1:])

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"baselines": CompareWithBaselines(self)}


class CompareWithBaselines(PyTorchCallback):
    """Logs the loss beside those of the baselines after every validation."""

    def __init__(self, trial: GPTTrial) -> None:
        self.is_chief = trial.context.distributed.get_rank() == 0
        self.baselines = baselines(trial.text, trial.validation)

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        if self.is_chief:
            logger.info(
                "%.3f bits per byte; counting bytes gives %.3f, counting pairs %.3f",
                metrics["bits_per_byte"],
                self.baselines.unigram,
                self.baselines.bigram,
            )
