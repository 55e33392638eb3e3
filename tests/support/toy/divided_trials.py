"""Toys whose ranks hold different weights; each rank keeps those that it had when it saved."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import safe_get_full_fp32_param
from engine_trials import Experts
from parallel_trials import PipelineTrial, ds_config

from trial_core.deepspeed import DeepSpeedTrialContext, ModelParallelUnit

TIED = "tied_modules.ends"


def keep_truth(engine: Any, folder: str, rank: int, renamed: Any = str) -> None:
    """Write a rank's weights, as its model and as its optimizer have them."""
    truth = {}
    for name, each in engine.module.named_parameters(remove_duplicate=False):
        live, master = each.detach(), safe_get_full_fp32_param(each)
        truth[renamed(name)] = {"16bit": live, "fp32": live if master is None else master}
    torch.save(truth, Path(folder) / f"truth-{rank}.pt")


class Ends(torch.nn.Linear):
    """The first layer, whose weights the last one has, too."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs.to(self.weight.dtype))

    def back(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.weight


def loss_of(outputs: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(outputs.float().sum(1, keepdim=True), index / 64)


class TiedPipeline(PipelineTrial):
    """A pipeline of two stages whose ends are tied; a function has no file."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self._prepare(context)
        model = PipelineModule(
            layers=[
                TiedLayerSpec("ends", Ends, 2, 5),
                LayerSpec(torch.nn.Linear, 5, 5),
                torch.tanh,
                LayerSpec(torch.nn.Linear, 5, 5),
                TiedLayerSpec("ends", Ends, 2, 5, forward_fn=Ends.back),
            ],
            num_stages=2,
            loss_fn=loss_of,
            partition_method="uniform",
        )
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=list(model.parameters()),
            config={**ds_config(self.hparams), "bf16": {"enabled": self.hparams["bf16"]}},
        )
        self.engine = context.wrap_model_engine(engine)
        self.seen_indices = context.wrap_reducer(sorted, name="indices", for_training=False)

    def save(self, context: DeepSpeedTrialContext, path: Path) -> None:
        super().save(context, path)
        rank = context.distributed.get_rank()
        keep_truth(self.engine, self.hparams["record"], rank, lambda name: name.replace(TIED, "0"))


class HalfExperts(Experts):
    """Experts that two ranks share, in bf16 or fp32."""

    def _config(self) -> dict[str, Any]:
        return {**ds_config(self.hparams), "bf16": {"enabled": self.hparams["bf16"]}}

    def save(self, context: DeepSpeedTrialContext, path: Path) -> None:
        super().save(context, path)
        rank, layer = context.distributed.get_rank(), self.first.module.experts
        begin = rank % layer.ep_size * layer.num_local_experts

        def with_global_index(name: str) -> str:
            counted = lambda match: f"{match[1]}{int(match[2]) + begin}"  # noqa: E731
            return re.sub(r"(deepspeed_experts\.)(\d+)", counted, name)

        keep_truth(self.first, self.hparams["record"], rank, with_global_index)


class AutoTensorParallel(PipelineTrial):
    """A decoder of transformers whose layers AutoTP divides between two ranks."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        self._prepare(context)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
            )
        )  # fmt: skip
        config = {**ds_config(self.hparams), "bf16": {"enabled": self.hparams["bf16"]}}
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=list(model.parameters()),
            config={**config, "tensor_parallel": {"autotp_size": 2}},
        )
        self.engine = context.wrap_model_engine(engine)
        context.set_mpu(ModelParallelUnit(0, 1, context.distributed.get_rank() == 0, True))

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        tokens = next(dataloader_iter)[1].long().reshape(1, -1)
        loss = self.engine(input_ids=tokens, labels=tokens).loss
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        tokens = next(dataloader_iter)[1].long().reshape(1, -1)
        return {"loss": self.engine(input_ids=tokens, labels=tokens).loss}
