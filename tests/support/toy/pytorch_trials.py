"""PyTorchTrials that several ranks must train as a single one does, in a fraction of a second.

In float64, so that the same mean computed in another order differs by little. Hyperparameters:
global_batch_size, train_samples, validation_samples, shuffle, record (a folder for each rank's
records), unused (`find_unused_parameters`), passes (`backward_passes_per_step`), compression
(`fp16_compression`) and loss_factor.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from trial_core.pytorch import (
    DataLoader,
    LRScheduler,
    PyTorchCallback,
    PyTorchTrial,
    PyTorchTrialContext,
)
from trial_core.pytorch.distributed_model import unwrapped

FEATURES = 3


def samples(count: int) -> TensorDataset:
    """Inputs, and their index, so that a test can identify them."""
    index = torch.arange(count, dtype=torch.float64).unsqueeze(1)
    return TensorDataset(torch.cat([index / count, torch.sin(index), torch.cos(index)], 1), index)


def net(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, 1)).double()


class KeepsWeights(PyTorchCallback):
    """Writes this rank's weights when training ends."""

    def __init__(self, trial: Small) -> None:
        self.trial = trial

    def on_trial_shutdown(self) -> None:
        self.trial.write_weights()


class Small(PyTorchTrial):
    """One model and one optimizer; subclasses have others."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        defaults = {"global_batch_size": 4, "train_samples": 48, "validation_samples": 12}
        self.hparams = {**defaults, **context.get_hparams()}
        self.build()

    def build(self) -> None:
        self.model = self.wrap(net())
        self.optimizer = self.wrap_sgd(self.model)

    def wrap(self, model: nn.Module) -> Any:
        return self.context.wrap_model(
            model, find_unused_parameters=self.hparams.get("unused", False)
        )

    def wrap_sgd(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.context.wrap_optimizer(
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
            backward_passes_per_step=self.hparams.get("passes", 1),
            fp16_compression=self.hparams.get("compression"),
        )

    def loss(self, output: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        factor = self.hparams.get("loss_factor", 1.0)
        return nn.functional.mse_loss(output, torch.sin(index / 3)) * factor

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        inputs, index = batch
        loss = self.loss(self.model(inputs), index)
        self.context.backward(loss)
        self.note("gradients", [batch_idx, float(next(self.model.parameters()).grad.sum())])
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        inputs, index = batch
        return {"loss": self.loss(self.first_model(inputs), index)}

    @property
    def first_model(self) -> nn.Module:
        return self.context.models[0]

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(
            samples(self.hparams["train_samples"]),
            batch_size=self.hparams["global_batch_size"] // self.context.distributed.get_size(),
            shuffle=self.hparams.get("shuffle", False),
        )

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(samples(self.hparams["validation_samples"]), batch_size=2)

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"weights": KeepsWeights(self)}

    def note(self, name: str, record: Any) -> None:
        """Add a line to this rank's records of that name."""
        if folder := self.hparams.get("record"):
            rank = self.context.distributed.get_rank()
            with (Path(folder) / f"{name}-{rank}.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")

    def write_weights(self) -> None:
        if folder := self.hparams.get("record"):
            rank = self.context.distributed.get_rank()
            weights = [unwrapped(model).state_dict() for model in self.context.models]
            torch.save(weights, Path(folder) / f"weights-{rank}.pt")


# ------------------------------------------------------- forwards and backwards in any order


class Untrained(Small):
    """Has a layer that nothing uses, and steps only with the hyperparameter `steps`."""

    def build(self) -> None:
        model = net()
        model.add_module("spare", nn.Linear(2, 2))
        model.forward = lambda inputs: nn.Sequential(*[*model][:-1])(inputs)  # type: ignore
        self.model = self.wrap(model)
        self.optimizer = self.wrap_sgd(self.model)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        inputs, index = batch
        loss = self.loss(self.model(inputs), index)
        self.context.backward(loss)
        if self.hparams["steps"]:
            self.context.step_optimizer(self.optimizer)
        return {"loss": loss}


class Gan(Small):
    """A discriminator on real and on generated samples, then a generator through it.

    The discriminator keeps the gradients of the generator's loss until its next batch, also across
    a checkpoint.
    """

    def build(self) -> None:
        self.generator = self.wrap(nn.Linear(1, FEATURES).double())
        self.discriminator = self.wrap(net())
        self.of_generator = self.wrap_sgd(self.generator)
        self.of_discriminator = self.wrap_sgd(self.discriminator)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        real, index = batch
        fake = self.generator(index / 48)
        of_real = self.discriminator(real).sub(1).square().mean()
        self.context.backward(of_real)
        of_fake = self.discriminator(fake.detach()).square().mean()
        self.context.backward(of_fake)
        self.context.step_optimizer(self.of_discriminator)
        fooled = self.discriminator(fake).sub(1).square().mean()
        self.context.backward(fooled)
        self.context.step_optimizer(self.of_generator)
        return {"discriminator": of_real + of_fake, "generator": fooled}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.discriminator(batch[0]).mean()}


class TwoBackwards(Small):
    """Two losses of one forward pass, each through every parameter."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        inputs, index = batch
        output = self.model(inputs)
        first, second = self.loss(output, index), output.square().mean()
        self.context.backward(first, retain_graph=True)
        self.context.backward(second)
        self.context.step_optimizer(self.optimizer)
        return {"first": first, "second": second}


class TwoForwards(Small):
    """Two forward passes before one backward pass through both, then one more of each."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        inputs, index = batch
        loss = self.loss(self.model(inputs), index) + self.model(-inputs).square().mean()
        self.context.backward(loss)
        self.context.backward(self.model(inputs + 1).square().mean())
        self.context.step_optimizer(self.optimizer)
        return loss


class Encoder(nn.Module):
    """A model whose other methods, and attributes, a trial uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = net(4), nn.Linear(1, 1).double()
        self.scale = 1.0

    def encode(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.body(inputs) * self.scale

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(inputs))


class OtherMethod(Small):
    """Never calls the model itself; changes an attribute of it."""

    def build(self) -> None:
        self.model = self.wrap(Encoder())
        self.optimizer = self.wrap_sgd(self.model)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        inputs, index = batch
        self.model.scale = 1.0 + batch_idx
        loss = self.loss(self.model.head(self.model.encode(inputs)), index)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}


class Heads(nn.Module):
    """Two heads on a body: each batch uses one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh()).double()
        self.heads = nn.ModuleList([nn.Linear(4, 1).double() for _ in range(3)])

    def forward(self, inputs: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](self.body(inputs))


class UnusedParameters(Small):
    """Each pair of samples uses another head, and so does each rank; no sample uses the third."""

    def build(self) -> None:
        self.model = self.wrap(Heads())
        self.optimizer = self.wrap_sgd(self.model)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        inputs, index = batch
        of_head = index.flatten() // 2 % 2
        loss = torch.zeros((), dtype=torch.float64)
        for head in (0, 1):
            if (of_head == head).any():
                chosen = of_head == head
                squares = self.model(inputs[chosen], head).sub(index[chosen] / 48).square()
                loss = loss + squares.sum() / len(inputs)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.model(batch[0], 0).mean()}


class HeadsInTurn(UnusedParameters):
    """Two losses of one body, each through a separate head, in two backward passes."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        inputs, index = batch
        body = self.model.body(inputs) if self.hparams.get("by_parts") else None
        for head in (0, 1):
            output = self.model(inputs, head) if body is None else self.model.heads[head](body)
            self.context.backward(self.loss(output, index), retain_graph=body is not None)
        self.context.step_optimizer(self.optimizer)
        return {"loss": output.mean()}


class FrozenTeacher(Small):
    """A model without a trained parameter, beside one that learns from it."""

    def build(self) -> None:
        torch.manual_seed(self.context.distributed.get_rank())  # as pretrained on each rank
        self.teacher = self.wrap(net(16).requires_grad_(False))
        self.model = self.wrap(net())
        self.optimizer = self.wrap_sgd(self.model)
        if self.hparams.get("steps_teacher"):
            self.of_teacher = self.wrap_sgd(self.teacher)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        inputs, _ = batch
        loss = nn.functional.mse_loss(self.model(inputs), self.teacher(inputs))
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        if self.hparams.get("steps_teacher"):
            self.context.step_optimizer(self.of_teacher)
        return {"loss": loss}


class LateUnfreeze(Small):
    """Trains its last layer alone for two batches, then all layers. Then freezes the last one."""

    def build(self) -> None:
        model = net()
        model[0].requires_grad_(False)
        self.model = self.wrap(model)
        self.optimizer = self.wrap_sgd(self.model)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        if batch_idx == 2:
            unwrapped(self.model)[0].requires_grad_(True)
        inputs, index = batch
        loss = self.loss(self.model(inputs), index)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}


class InEvaluationMode(Small):
    """Trains a model in evaluation mode, as fine-tuning with fixed running means does."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.model.eval()
        return super().train_batch(batch, epoch_idx, batch_idx)


class Penalised(Small):
    """A loss with the norm of its gradients."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        inputs, index = batch
        inputs = inputs.clone().requires_grad_()
        output = self.model(inputs)
        slope = torch.autograd.grad(output.sum(), inputs, create_graph=True)[0]
        loss = self.loss(output, index) + slope.square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}


class TwoOptimizers(Small):
    """An optimizer for each layer; the second one steps in every batch but the third."""

    def build(self) -> None:
        self.model = self.wrap(net())
        first, _, last = unwrapped(self.model)
        self.optimizers = [self.wrap_sgd(first), self.wrap_sgd(last)]

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        inputs, index = batch
        loss = self.loss(self.model(inputs), index)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizers[1])
        if batch_idx != 2:
            self.context.step_optimizer(self.optimizers[0])
        return {"loss": loss}


class Recomputing(nn.Module):
    """Uses a layer twice, and computes it again while gradients are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.last = (
            nn.Linear(*sizes).double() for sizes in ((FEATURES, 4), (4, 4), (4, 1))
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for _ in range(2):
            hidden = checkpoint(self.layer, torch.tanh(hidden), use_reentrant=True)
        return self.last(hidden)


class Recomputes(Small):
    """Trains a model whose backward pass reaches a layer twice."""

    def build(self) -> None:
        self.model = self.wrap(Recomputing())
        self.optimizer = self.wrap_sgd(self.model)


class SparseEmbedding(Small):
    """Trains an embedding with sparse gradients."""

    def build(self) -> None:
        self.model = self.wrap(nn.Embedding(5, 2, sparse=True).double())
        self.optimizer = self.wrap_sgd(self.model)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.model(batch[1].long() % 5).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.model(batch[1].long() % 5).mean()}


class UnknownEpochs(Small):
    """A schedule of epochs, with a loader that does not know their length."""

    def build(self) -> None:
        super().build()
        self.context.disable_dataset_reproducibility_checks()
        steps = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.context.wrap_lr_scheduler(steps, LRScheduler.StepMode.STEP_EVERY_EPOCH)

    def build_training_data_loader(self) -> Any:
        batches = list(super().build_training_data_loader())
        return iter(batches)


class SkipsBackward(Small):
    """Has no backward pass in the batch that steps, only in those before it."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        inputs, index = batch
        loss = self.loss(self.model(inputs), index)
        if batch_idx % 3 != 2:
            self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}
