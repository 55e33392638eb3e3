"""Toy trials with several engines, or with an engine of an unusual kind."""

from __future__ import annotations

import json
import random
from typing import Any

import deepspeed
import numpy as np
import torch
from odd_optimizer import OddOptimizer
from parallel_trials import ds_config
from toy_trial import ToyTrial

from trial_core.deepspeed import DeepSpeedTrialContext


def perceptron(inputs: int, outputs: int) -> torch.nn.Module:
    """A small model with dropout, so that random state matters."""
    return torch.nn.Sequential(
        torch.nn.Linear(inputs, 16),
        torch.nn.Dropout(0.2),
        torch.nn.Tanh(),
        torch.nn.Linear(16, outputs),
    )


class SeveralEngines(ToyTrial):
    """Two engines, each with its own optimizer."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.hparams = {
            "micro_batch_size": 2,
            "accumulation": 2,
            "zero_stage": 1,
            "train_samples": 50,
            "validation_samples": 12,
            "shuffle": True,
            **context.get_hparams(),
        }
        self.record = self.hparams.get("record")
        self.first, self.second = self._wrapped(self.models())

    def models(self) -> tuple[torch.nn.Module, torch.nn.Module]:
        return perceptron(2, 4), perceptron(2, 4)

    def _wrapped(self, models: tuple[torch.nn.Module, ...]) -> list[Any]:
        engines = [
            deepspeed.initialize(
                model=model, model_parameters=model.parameters(), config=ds_config(self.hparams)
            )[0]
            for model in models
        ]
        return [self.context.wrap_model_engine(engine) for engine in engines]

    def _next(self, batches: Any, *note: Any) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, index = self.context.to_device(next(batches))
        if self.record:
            with self._file("samples").open("a") as file:
                file.write(json.dumps([*note, *index.flatten().tolist()]) + "\n")
        return inputs, index


def error(outputs: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The toys' loss."""
    return torch.nn.functional.mse_loss(outputs.sum(1, keepdim=True), index / 64)


class Independent(SeveralEngines):
    """Two models trained on the same data."""

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        inputs, index = self._next(dataloader_iter, batch_idx)
        losses = {}
        for name, engine in (("first", self.first), ("second", self.second)):
            loss = error(engine(inputs), index)
            engine.backward(loss)
            engine.step()
            losses[name] = loss
        return losses

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        inputs, index = self._next(dataloader_iter, "validation")
        return {
            "loss": error(self.first(inputs), index),
            "other": error(self.second(inputs), index),
        }


class Adversarial(SeveralEngines):
    """A generator that imitates the samples, and a critic that tells them apart."""

    def models(self) -> tuple[torch.nn.Module, torch.nn.Module]:
        return perceptron(2, 2), perceptron(2, 1)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        real, _ = self._next(dataloader_iter, batch_idx)
        fake = self.first(torch.randn_like(real))
        judge = torch.nn.functional.binary_cross_entropy_with_logits
        ones = torch.ones(len(real), 1, device=real.device)
        zeros = torch.zeros_like(ones)
        critic = judge(self.second(real), ones) + judge(self.second(fake.detach()), zeros)
        self.second.backward(critic)
        self.second.step()
        # This loss passes through the critic but must leave no gradient there.
        self.second.module.requires_grad_(False)
        generator = judge(self.second.module(fake), ones)
        self.first.backward(generator)
        self.second.module.requires_grad_(True)
        self.first.step()
        return {"critic": critic, "generator": generator}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        real, _ = self._next(dataloader_iter, "validation")
        return {"loss": self.second(real).mean() - self.second(self.first(real)).mean()}


class Joint(SeveralEngines):
    """One loss through two engines: the first one's output is the second one's input."""

    def models(self) -> tuple[torch.nn.Module, torch.nn.Module]:
        return perceptron(2, 4), perceptron(4, 4)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        inputs, index = self._next(dataloader_iter, batch_idx)
        loss = error(self.second(self.first(inputs)), index)
        loss.backward()
        self.first.step()
        self.second.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        inputs, index = self._next(dataloader_iter, "validation")
        return {"loss": error(self.second(self.first(inputs)), index)}


class ByHand(Independent):
    """Accumulates itself: one call of train_batch is one batch."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        context.disable_auto_grad_accumulation()

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        losses = [
            super(ByHand, self).train_batch(dataloader_iter, epoch_idx, batch_idx)
            for _ in range(self.hparams["accumulation"])
        ]
        return {name: torch.stack([loss[name] for loss in losses]).mean() for name in losses[0]}


class ByHandTooLittle(ByHand):
    """Disables auto accumulation, and trains all micro-batches of a batch but one."""

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        for _ in range(self.hparams["accumulation"] - 1):
            metrics = Independent.train_batch(self, dataloader_iter, epoch_idx, batch_idx)
        return metrics


class RareGenerator(Adversarial):
    """Trains the generator, the first engine, in every second batch, and then twice."""

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        inputs, index = self._next(dataloader_iter, batch_idx)
        critic = error(self.second(inputs), index)
        self.second.backward(critic)
        self.second.step()
        for _ in range(2 * (batch_idx % 2)):
            self.first.backward(error(self.first(inputs), index))
            self.first.step()
        return {"critic": critic, "generator": 0.0}


class OwnConfig(ToyTrial):
    """The toy with more DeepSpeed configuration, the hyperparameter `ds_config`.

    Its training loss is weighted by random numbers from Python's and numpy's generators.
    """

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        context.models.clear()
        model = self.model()
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            optimizer=self.optimizer(model),
            config={**ds_config(self.hparams), **self.hparams["ds_config"]},
        )
        self.engine = context.wrap_model_engine(engine)

    def model(self) -> torch.nn.Module:
        return perceptron(2, 4)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer | None:
        """None: DeepSpeed makes the one that its configuration names."""
        return None

    def _loss(self, inputs: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        dtype = next(self.engine.module.parameters()).dtype
        loss = error(self.engine(inputs.to(dtype)).float(), index)
        if self.engine.module.training:
            loss = loss * (0.5 + random.random()) * (0.5 + np.random.rand())
        return loss


class OddStates(OwnConfig):
    """Its optimizer has states of other types than the weights."""

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer | None:
        return OddOptimizer(model.parameters())


class RankBuffers(OwnConfig):
    """Its running means differ between ranks, which see other samples."""

    def model(self) -> torch.nn.Module:
        return torch.nn.Sequential(perceptron(2, 4), torch.nn.BatchNorm1d(4))


class FrozenLater(OwnConfig):
    """Freezes its first layer while it is trained, in batch 3."""

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.engine.module[0].requires_grad_(batch_idx < 3)
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)


class Unrestored(FrozenLater, OddStates):
    """All that DeepSpeed does not restore by itself, with buffers as in `RankBuffers`."""

    def model(self) -> torch.nn.Module:
        return torch.nn.Sequential(*perceptron(2, 4), torch.nn.BatchNorm1d(4))


class Experts(SeveralEngines):
    """A model with a mixture-of-experts layer, whose `experts` are divided among `ep` ranks."""

    def models(self) -> tuple[torch.nn.Module, ...]:
        ranks = self.hparams.get("ep", self.context.distributed.get_size())
        return (Mixture(self.hparams.get("experts", 2), ranks),)

    def _wrapped(self, models: tuple[torch.nn.Module, ...]) -> list[Any]:
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        parameters = split_params_into_different_moe_groups_for_optimizer(
            {"params": list(models[0].parameters()), "name": "all"}
        )
        engine, *_ = deepspeed.initialize(
            model=models[0], model_parameters=parameters, config=self._config()
        )
        return [self.context.wrap_model_engine(engine), None]

    def _config(self) -> dict[str, Any]:
        return ds_config(self.hparams)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        inputs, index = self._next(dataloader_iter, batch_idx)
        loss = error(self.first(inputs), index)
        self.first.backward(loss)
        self.first.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        inputs, index = self._next(dataloader_iter, "validation")
        return {"loss": error(self.first(inputs), index)}


class Mixture(torch.nn.Module):
    """Experts between two linear layers."""

    def __init__(self, experts: int, ranks: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.before, self.after = torch.nn.Linear(2, 8), torch.nn.Linear(8, 2)
        expert, groups = torch.nn.Linear(8, 8), min(experts, ranks)
        self.experts = MoE(8, expert, num_experts=experts, ep_size=groups, min_capacity=0)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        mixed, _, _ = self.experts(self.before(inputs.to(self.before.weight.dtype)))
        result: torch.Tensor = self.after(torch.tanh(mixed)).float()
        return result


class OneStep(OwnConfig):
    """Trains all micro-batches in one call, with one step after them."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        if self.hparams.get("by_hand", True):
            context.disable_auto_grad_accumulation()

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        for _ in range(self.hparams["accumulation"]):
            inputs, index = self.context.to_device(next(dataloader_iter))
            loss = self._loss(inputs, index)
            self.engine.backward(loss)
            if self.record:
                with self._file("samples").open("a") as file:
                    file.write(json.dumps([batch_idx, *index.flatten().tolist()]) + "\n")
        self.engine.step()
        return {"loss": loss}
