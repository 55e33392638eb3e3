"""PyTorchTrials whose models the experiment shards, or does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from toy_trial import samples

from trial_core.pytorch import (
    DataLoader,
    LRScheduler,
    PyTorchCallback,
    PyTorchTrial,
    PyTorchTrialContext,
)


class Block(nn.Module):
    """One of the blocks, of sizes that 2 and 4 ranks divide unevenly."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.dropout(torch.tanh(self.up(inputs)))
        return inputs + self.down(hidden)


class Net(nn.Module):
    """Blocks with a frozen layer before them, a buffer, and parameters smaller than the ranks."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.enter = nn.Linear(2, 5).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        outputs: torch.Tensor = self.head(self.norm(hidden))
        return outputs


class Sharded(PyTorchTrial):
    """Hyperparameters: global_batch_size, seed, dropout, validation_samples, record (a folder),
    reverse (the model's parts are defined in the reverse order)."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        self.hparams = {"dropout": 0.2, "validation_samples": 5, **context.get_hparams()}
        torch.manual_seed(self.hparams.get("seed", 3) + context.distributed.get_rank())
        self.wrap()

    def wrap(self) -> None:
        """Build and wrap models and optimizers."""
        net = Net(self.hparams["dropout"])
        if self.hparams.get("reverse"):
            net._modules = dict(reversed(net._modules.items()))
        self.model = self.context.wrap_model(net)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        # A large eps: otherwise AdamW turns rounding of tiny gradients into whole steps.
        optimizer = torch.optim.AdamW(trained, lr=0.01, eps=1e-3)
        self.optimizer = self.context.wrap_optimizer(optimizer)
        self.context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.9),
            step_mode=LRScheduler.StepMode.STEP_EVERY_BATCH,
        )

    def _loss(self, batch: Any) -> torch.Tensor:
        inputs, index = batch
        return nn.functional.mse_loss(self.model(inputs), index / 64)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss = self._loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(
            self.optimizer, clip_grads=lambda params: nn.utils.clip_grad_norm_(params, 0.05)
        )
        self._record([batch_idx, *batch[1].flatten().tolist()])
        return {"loss": loss}

    def _record(self, line: list[float]) -> None:
        if folder := self.hparams.get("record"):
            path = Path(folder, f"samples-{self.context.distributed.get_rank()}.jsonl")
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": self._loss(batch), "mean_index": batch[1].mean()}

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(samples(46), self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(samples(self.hparams["validation_samples"]), batch_size=2)


class TwoModels(Sharded):
    """A generator and a critic that step in turn, as a GAN does; the critic is called twice."""

    def wrap(self) -> None:
        self.model = self.context.wrap_model(Net(0.0))
        self.critic = self.context.wrap_model(nn.Sequential(nn.Linear(1, 6), nn.Linear(6, 1)))
        self.optimizers = [
            self.context.wrap_optimizer(torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3))
            for model in (self.model, self.critic)
        ]

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        inputs, index = batch
        fake = self.model(inputs)
        gap = self.critic(fake.detach()).mean() - self.critic(index / 64).mean()
        self.context.backward(gap)
        self.context.step_optimizer(self.optimizers[1])
        loss = self._loss(batch) - self.critic(fake).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizers[0])
        for each in self.optimizers:
            each.zero_grad()
        return {"loss": loss, "gap": gap}


class Scaled(Sharded):
    """In mixed precision with a gradient scaler; one batch overflows on one rank."""

    def wrap(self) -> None:
        super().wrap()
        self.context.experimental.use_amp()

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        if batch_idx == 2 and self.context.distributed.get_rank() == 1:
            batch = [batch[0], batch[1] * float("inf")]
        metrics = super().train_batch(batch, epoch_idx, batch_idx)
        return {**metrics, "scale": self.context.scaler.get_scale()}


class ShardedByHand(Sharded):
    """Calls fully_shard itself, on a mesh of two dimensions."""

    def wrap(self) -> None:
        size = self.context.distributed.get_size()
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("copies", "parts"))
        model = Net(0.0)
        for each in (*model.parameters(), *model.buffers()):
            torch.distributed.broadcast(each.data, 0)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        self.model = self.context.wrap_model(fully_shard(model, mesh=mesh))
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = self.context.wrap_optimizer(torch.optim.AdamW(trained, lr=0.01))


class Gathering(PyTorchCallback):
    """Puts a whole weight into the checkpoint's state, which FSDP2 does not divide."""

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["models_state_dict"][0]
        checkpoint["models_state_dict"][0] = {
            **weights, "head.bias": weights["head.bias"].full_tensor()
        }  # fmt: skip

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
        assert set(checkpoint) >= {"models_state_dict", "optimizers_state_dict", "callbacks"}


class WithHooks(Sharded):
    """A callback that changes the state."""

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"gathering": Gathering()}
