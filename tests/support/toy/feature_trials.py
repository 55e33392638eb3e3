"""Toys for the matrix of DeepSpeed's features.

Beside each checkpoint they keep the weights as the engines have them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from engine_trials import Experts, Independent
from export_trials import live_weights
from parallel_trials import PipelineTrial
from topology_trials import AnyTopology, Assorted
from toy_trial import ToyTrial

from trial_core.callbacks import ExponentialMovingAverage
from trial_core.deepspeed import DeepSpeedTrialContext, ModelParallelUnit
from trial_core.pytorch import PyTorchCallback


class KeepsTruth(PyTorchCallback):
    """After each save, writes each engine's weights to ``truth-{engine}.pt`` in `folder`."""

    def __init__(self, engines: list[Any], folder: Path) -> None:
        self.engines, self.folder = engines, folder

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        for number, engine in enumerate(self.engines):
            ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, live_weights(engine)[1])
            # Buffers differ among the ranks; a checkpoint has those of the first one.
            every = {
                name: tensor.cpu() for rank in reversed(ranks) for name, tensor in rank.items()
            }
            if dist.get_rank() == 0:
                torch.save(every, self.folder / f"truth-{number}.pt")


class WithTruth(ToyTrial):
    """Hyperparameter: `truth`, the folder for the weights of the engines."""

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        callbacks = super().build_callbacks()
        callbacks["truth"] = KeepsTruth(self.context.models, Path(self.hparams["truth"]))
        return callbacks


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with the nested values of `changes`; None removes a key."""
    result = dict(base)
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            value = merged(result[key], value)
        result[key] = value
    return {key: value for key, value in result.items() if value is not None}


class AnyConfig(WithTruth, AnyTopology):
    """More hyperparameters: `ds_config`, which is merged into DeepSpeed's config; `wide`, for
    weights of megabytes, and `freezes`: False for none that is frozen."""

    def model(self) -> Assorted:
        if self.hparams.get("wide"):
            wide = Assorted(1024, 1024)
            wide.frozen.requires_grad_(not self.hparams.get("freezes", True))
            return wide
        # ZeRO-3 pads odd sizes with uninitialised memory.
        return Assorted(8, 6) if self.hparams["zero_stage"] == 3 else Assorted()

    def _ds_config(self) -> dict[str, Any]:
        return merged(super()._ds_config(), self.hparams.get("ds_config", {}))


class OneGroup(AnyConfig):
    """All trained parameters in one group, without options."""

    def groups(self, model: Assorted) -> Any:
        return [each for each in model.parameters() if each.requires_grad]


class Averaged(OneGroup):
    """With averages of the weights."""

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {**super().build_callbacks(), "average": ExponentialMovingAverage(0.5)}


class ClientOptimizer(AnyConfig):
    """The trial's own optimizer and schedule."""

    def initialized(self, config: dict[str, Any]) -> Any:
        model = self.model()
        optimizer = torch.optim.AdamW(self.groups(model), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        unnamed = merged(config, {"optimizer": None, "scheduler": None})
        return deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=schedule, config=unnamed
        )[0]


class ZeroInit(AnyConfig):
    """The model is built under ``deepspeed.zero.Init``."""

    def model(self) -> Assorted:
        with deepspeed.zero.Init(config_dict_or_path=self._ds_config()):
            return super().model()


class Compiled(AnyConfig):
    """``engine.compile()``, with the hyperparameter `backend`."""

    def initialized(self, config: dict[str, Any]) -> Any:
        engine = super().initialized(config)
        engine.compile(backend=self.hparams["backend"])
        return engine


class Recomputing(Assorted):
    """Recomputes activations in the backward pass."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        def middle(hidden: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.frozen(self.norm(hidden)))

        hidden = deepspeed.checkpointing.checkpoint(middle, self.inputs(inputs))
        outputs: torch.Tensor = self.first(hidden) + self.last(torch.tanh(hidden))
        return outputs


class CheckpointedActivations(AnyConfig):
    """Activation checkpointing, with its section of DeepSpeed's config."""

    def model(self) -> Assorted:
        deepspeed.checkpointing.configure(None, deepspeed_config=self._ds_config())
        return Recomputing(8, 6)


class Embedded(torch.nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first = torch.nn.Embedding(64, 8, sparse=True), torch.nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.first(self.embedding((inputs[:, 0] * 50).long()))
        return outputs


class SparseGradients(OneGroup):
    """Gradients of an embedding are reduced as rows and values."""

    def model(self) -> Any:
        return Embedded()


class Muon(OneGroup):
    """Matrices by Muon, the rest by its Adam."""

    def model(self) -> Assorted:
        model = super().model()
        for parameter in model.parameters():
            parameter.use_muon = parameter.ndim >= 2  # type: ignore[attr-defined]
        return model


class HuggingFace(WithTruth, AnyTopology):
    """A small model of ``transformers``. Hyperparameters: `kind`, `ds_config`, and
    `tensor_parallel` if all ranks share one model."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        if self.hparams.get("tensor_parallel"):
            context.set_mpu(ModelParallelUnit(0, 1, context.distributed.get_rank() == 0, True))

    def initialized(self, config: dict[str, Any]) -> Any:
        import transformers
        from transformers.integrations import HfDeepSpeedConfig

        config = merged(config, self.hparams["ds_config"])
        self.keeps_alive = HfDeepSpeedConfig(config)
        sizes = {
            "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32,
        }  # fmt: skip
        if self.hparams["kind"] == "mixtral":
            sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
        described = transformers.AutoConfig.for_model(self.hparams["kind"], **sizes)
        model = transformers.AutoModelForCausalLM.from_config(described)
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        if "compile" in config:
            engine.compile()
        return engine

    def _loss(self, inputs: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ids = (index.long() + torch.arange(8, device=index.device)) % 32
        loss: torch.Tensor = self.engine(input_ids=ids, labels=ids).loss
        return loss


class Pipeline(WithTruth, PipelineTrial):
    """A pipeline of two stages."""


class TwoEngines(WithTruth, Independent):
    """Two models, each with an engine."""

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        losses = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        return {"loss": losses["first"] + losses["second"]}


class MixtureOfExperts(WithTruth, Experts):
    """Experts, divided among the ranks."""
