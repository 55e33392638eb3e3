"""Toy trials whose callbacks take part in the validation."""

from __future__ import annotations

from typing import Any

import torch
from hook_trials import CallLog
from toy_trial import ToyTrial

from trial_core.deepspeed import DeepSpeedTrialContext
from trial_core.pytorch import PyTorchCallback


class SamplesModel(PyTorchCallback):
    """In each validation hook, runs the model twice and adds the hook to a custom reducer."""

    def __init__(self, trial: Sampling) -> None:
        self.trial = trial

    def _sample(self, hook: str) -> None:
        inputs = torch.ones(4, 2)
        first, second = self.trial.engine(inputs), self.trial.engine(inputs)
        self.trial.log.add(
            "sampled", hook=hook, repeats=torch.equal(first, second), grad=first.requires_grad
        )
        self.trial.added.update(hook)

    def on_validation_start(self) -> None:
        self._sample("start")

    def on_validation_epoch_start(self) -> None:
        self._sample("epoch_start")

    def on_validation_epoch_end(self, outputs: list[Any]) -> None:
        self._sample("epoch_end")

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self._sample("end")


def count(hooks: list[str]) -> dict[str, int]:
    """How often each hook was added."""
    return {hook: hooks.count(hook) for hook in ("start", "epoch_start", "epoch_end", "end")}


class Sampling(ToyTrial):
    """Logs whether two runs of the model are equal, which dropout prevents, and its gradients."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        self.log = CallLog(context)
        self.added: Any = context.wrap_reducer(count, for_training=False)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.log.add("trained", training=self.engine.training, grad=torch.is_grad_enabled())
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"samples": SamplesModel(self)}


class ChangesMetrics(PyTorchCallback):
    """Changes the validation metrics, differently on each rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.seen = 0

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self.seen += 1
        del metrics["loss"]
        # Grows with each validation, so that the first one is the best.
        metrics["perplexity"] = torch.tensor(float(10 * self.seen + self.rank))


class Changed(ToyTrial):
    """Only a callback reports the searcher metric, perplexity. With `callback_on`, on one rank."""

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        rank = self.context.distributed.get_rank()
        if self.hparams.get("callback_on", rank) != rank:
            return {}
        return {"changes": ChangesMetrics(rank)}
