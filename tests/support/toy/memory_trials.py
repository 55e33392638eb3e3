"""Trials whose memory is too small for large micro-batches.

Hyperparameters: fits, the samples that fit; spills_at, the batch in which rank 1 notices.
"""

from __future__ import annotations

import torch
from toy_trial import ToyTrial, samples

from trial_core.pytorch import DataLoader


class OwnSize(ToyTrial):
    """Its loader has a size of its own."""

    def _loss(self, inputs: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        is_late = self.engine.global_steps >= self.hparams.get("spills_at", 0)
        too_large = torch.is_grad_enabled() and len(inputs) > self.hparams["fits"]
        if too_large and is_late and self.context.distributed.get_rank() == 1:
            raise torch.OutOfMemoryError("out of memory: tried to allocate 2 GiB")
        return super()._loss(inputs, index)


class Greedy(OwnSize):
    """Its loader follows the engine."""

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(
            samples(self.hparams["train_samples"]),
            batch_size=self.engine.train_micro_batch_size_per_gpu(),
            shuffle=self.hparams["shuffle"],
        )
