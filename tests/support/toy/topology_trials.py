"""A toy whose batches have the same samples on any number of ranks.

Its checkpoints hold parameter groups, tied and frozen weights, buffers, and odd sizes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import deepspeed
import torch
from toy_trial import ToyTrial

from trial_core.deepspeed import DeepSpeedTrialContext


class Norm(torch.nn.LayerNorm):
    """Sums the means of its inputs in a buffer."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += inputs.detach().float().mean()
        return super().forward(inputs)


class Assorted(torch.nn.Module):
    """A model with all these kinds of parameters. `first` and `last` share a weight."""

    def __init__(self, hidden: int = 7, outputs: int = 5) -> None:
        super().__init__()
        self.inputs, self.norm, self.frozen = (
            torch.nn.Linear(2, hidden), Norm(hidden), torch.nn.Linear(hidden, hidden)
        )  # fmt: skip
        self.first = torch.nn.Linear(hidden, outputs, bias=False)
        self.last = torch.nn.Linear(hidden, outputs, bias=False)
        self.last.weight = self.first.weight
        self.frozen.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.frozen(self.norm(self.inputs(inputs))))
        outputs: torch.Tensor = self.first(hidden) + self.last(torch.tanh(hidden))
        return outputs


class AnyTopology(ToyTrial):
    """More hyperparameters: batch (samples), bf16, zero, seed, frozen_seed (of frozen weights),
    reverse (parameters are in the reverse order), config (more of DeepSpeed's)."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.hparams = {
            "batch": 8, "micro_batch_size": 2, "zero_stage": 1, "train_samples": 50,
            "validation_samples": 12, "shuffle": True, **context.get_hparams(),
        }  # fmt: skip
        self.record = self.hparams.get("record")
        torch.manual_seed(self.hparams.get("seed", 1))
        self.engine = context.wrap_model_engine(self.initialized(self._ds_config()))

    def model(self) -> Assorted:
        """The model before DeepSpeed has it."""
        return Assorted()

    def initialized(self, config: dict[str, Any]) -> Any:
        """The engine."""
        model = self.model()
        if "frozen_seed" in self.hparams:
            torch.manual_seed(self.hparams["frozen_seed"])
            model.frozen.reset_parameters()
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=self.groups(model), config=config
        )
        return engine

    def groups(self, model: Assorted) -> list[dict[str, Any]]:
        """The optimizer's groups of parameters."""
        weights = [model.inputs.weight, model.first.weight]
        rest = [model.inputs.bias, model.norm.weight, model.norm.bias]
        if self.hparams.get("reverse"):
            weights, rest = weights[::-1], rest[::-1]
        return [
            {"params": weights, "weight_decay": 0.1},
            {"params": rest, "weight_decay": 0.0, "lr": 2e-2},
        ]

    def _ds_config(self) -> dict[str, Any]:
        stage = self.hparams["zero_stage"]
        # Small: DeepSpeed never frees an engine's bucket, and warm ranks build many engines.
        zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 1000}
        if stage == 3:
            # Several flat buffers per group, and some parameters that stay unpartitioned.
            zero.update(sub_group_size=10, stage3_param_persistence_threshold=8)
        zero.update(self.hparams.get("zero", {}))
        config = {
            "train_batch_size": self.hparams["batch"],
            "train_micro_batch_size_per_gpu": self.hparams["micro_batch_size"],
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
            "zero_optimization": zero,
            "steps_per_print": 1000000,
        }
        config.update(self.hparams.get("config", {}))
        return {**config, "bf16": {"enabled": True}} if self.hparams.get("bf16") else config

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        inputs, index = self.context.to_device(next(dataloader_iter))
        loss = self._loss(inputs, index)
        self.engine.backward(loss)
        self.engine.step()
        if self.record:
            with self._file("samples").open("a") as file:
                seen = {
                    "batch": batch_idx, "epoch": epoch_idx, "samples": index.flatten().tolist(),
                    "draw": torch.rand(1).item(), "lr": self.engine.get_lr(), "loss": loss.item(),
                }  # fmt: skip
                file.write(json.dumps(seen) + "\n")
        return {"loss": loss}

    def _loss(self, inputs: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        outputs = self.engine(inputs.to(self.engine.module.first.weight.dtype)).float()
        return torch.nn.functional.mse_loss(outputs.sum(1, keepdim=True), index / 64)


class SavesItself(AnyTopology):
    """Saves more than DeepSpeed's shards."""

    def save(self, context: DeepSpeedTrialContext, path: Path) -> None:
        super().save(context, path)
        (path / f"own-{context.distributed.get_rank()}").write_text("mine")


class Misnames(AnyTopology):
    """As if DeepSpeed named two parameters of its flat buffers after each other."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        named = self.engine._get_zero_param_shapes
        swap = {"norm.weight": "norm.bias", "norm.bias": "norm.weight"}
        self.engine._get_zero_param_shapes = lambda: [
            {swap.get(name, name): shape for name, shape in group.items()} for group in named()
        ]


class ChangesWeights(AnyTopology):
    """Clips a weight after the optimizer's step."""

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        metrics = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        weight = self.engine.module.inputs.weight
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
            weight.clamp_(-0.1, 0.1)
        return metrics
