"""Trials whose optimizer and schedule take their settings from hyperparameters."""

from __future__ import annotations

import torch
from pytorch_trials import Small, net, samples
from torch.utils.data import BatchSampler, SequentialSampler

from trial_core.pytorch import DataLoader, LRScheduler


class Decaying(Small):
    """Hyperparameters: lr, and gamma, by which each batch multiplies the rate."""

    def build(self) -> None:
        self.model = self.wrap(net())
        self.optimizer = self.context.wrap_optimizer(
            torch.optim.SGD(self.model.parameters(), self.hparams["lr"])
        )
        self.wrap_schedule()

    def wrap_schedule(self) -> None:
        schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, self.hparams["gamma"])
        self.context.wrap_lr_scheduler(schedule, LRScheduler.StepMode.STEP_EVERY_BATCH)


class DecayingLate(Decaying):
    """Wraps its schedule where it builds its data, because a schedule may need their length."""

    def wrap_schedule(self) -> None:
        """Not yet."""

    def build_training_data_loader(self) -> DataLoader:
        super().wrap_schedule()
        return super().build_training_data_loader()


class FixedBatches(Small):
    """A rank's batches have two samples on any number of ranks.

    Hyperparameter: `sampled`, to have them from a sampler that does not tell it.
    """

    def build_training_data_loader(self) -> DataLoader:
        data = samples(self.hparams["train_samples"])
        if not self.hparams.get("sampled"):
            return DataLoader(data, batch_size=2)
        return DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 2, False))
