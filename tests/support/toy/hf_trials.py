"""A model of transformers, whole or adapted by LoRA, in a DeepSpeedTrial and a PyTorchTrial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import peft
import torch
from parallel_trials import ds_config
from pytorch_trials import Small
from toy_trial import ToyTrial
from transformers import GPT2Config, GPT2LMHeadModel

from trial_core.deepspeed import DeepSpeedTrialContext
from trial_core.pytorch.distributed_model import unwrapped


class Wrapped(torch.nn.Module):
    """A model of transformers within the trial's own."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.lm = model

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.lm(input_ids=tokens, labels=tokens).loss


class Tokens:
    """A tokenizer of one file."""

    def save_pretrained(self, folder: Path) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")


class CausalLM(ToyTrial):
    """Trains a small GPT-2; with `lora`, an adapter of it, and its head whole."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        context.models.clear()
        torch.manual_seed(5)
        sizes = {"n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
        ties = {"tie_word_embeddings": not self.hparams["lora"]}
        self.model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=64, **sizes, **ties))
        if self.hparams["lora"]:
            if context.distributed.get_rank() == 0:
                self.model.save_pretrained(Path(self.hparams["record"]) / "base")
            adapted = {"target_modules": ["c_attn", "c_fc"], "modules_to_save": ["lm_head"]}
            options = {"r": 2, "lora_alpha": 6, "fan_in_fan_out": True, "task_type": "CAUSAL_LM"}
            config = peft.LoraConfig(**adapted, **options, init_lora_weights=False)  # type: ignore[arg-type]
            self.model = peft.get_peft_model(self.model, config)
        if self.hparams.get("half"):
            self.model = self.model.bfloat16()
        context.set_tokenizer(Tokens())
        model = Wrapped(self.model)
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=[each for each in model.parameters() if each.requires_grad],
            config={**ds_config(self.hparams), "bf16": {"enabled": self.hparams["bf16"]}},
        )
        self.engine = context.wrap_model_engine(engine)

    def _loss(self, inputs: torch.Tensor, index: torch.Tensor) -> Any:
        return self.engine(index.long().reshape(1, -1))

    def save(self, context: DeepSpeedTrialContext, path: Path) -> None:
        super().save(context, path)
        with deepspeed.zero.GatheredParameters(list(self.model.parameters())):
            if context.distributed.get_rank() == 0:
                self.model.save_pretrained(Path(self.hparams["record"]) / "saved")


class TorchCausalLM(Small):
    """The same model in a PyTorchTrial. Its `saved` folder has the weights at the end."""

    def build(self) -> None:
        sizes = {"n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
        self.model = self.wrap(GPT2LMHeadModel(GPT2Config(vocab_size=64, **sizes)))
        self.optimizer = self.wrap_sgd(self.model)
        self.context.set_tokenizer(Tokens())

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.evaluate_batch(batch)["loss"]
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        tokens = batch[1].long().reshape(1, -1)
        return {"loss": self.model(input_ids=tokens, labels=tokens).loss}

    def write_weights(self) -> None:
        if self.context.distributed.get_rank() == 0:
            unwrapped(self.model).save_pretrained(Path(self.hparams["record"]) / "saved")
