"""Fine-tunes a causal language model of Hugging Face's transformers, whole or with LoRA."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import deepspeed
from base import base_model
from data import windows
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from trial_core.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext, overwrite_deepspeed_config
from trial_core.pytorch import DataLoader, MetricReducer

T = TypeVar("T")


class CausalLMTrial(DeepSpeedTrial):
    """One engine, which predicts the next token."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        hparams = context.get_hparams()
        name = hparams["model"] or first_on_each_machine(context, base_model)
        tokenizer = AutoTokenizer.from_pretrained(name)
        self.data = first_on_each_machine(context, lambda: windows(tokenizer, hparams["window"]))
        # ZeRO-3 divides it at once, because the experiment names the config: no rank has all of it.
        model = AutoModelForCausalLM.from_pretrained(name)
        if hparams["lora_rank"]:
            lora = LoraConfig(
                task_type="CAUSAL_LM",
                r=hparams["lora_rank"],
                lora_alpha=2 * hparams["lora_rank"],
                target_modules="all-linear",
            )
            model = get_peft_model(model, lora)
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=[each for each in model.parameters() if each.requires_grad],
            config=overwrite_deepspeed_config(
                hparams["deepspeed_config"], hparams["overwrite_deepspeed_args"]
            ),
        )
        self.engine = context.wrap_model_engine(engine)
        context.set_work_per_sample(tokens=hparams["window"])
        context.set_tokenizer(tokenizer)  # goes with the model when it is exported
        self.perplexity = context.wrap_reducer(Perplexity(), for_training=False)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss, _ = self._loss(dataloader_iter)
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        self.perplexity.update(*self._loss(dataloader_iter))
        return {}  # the reducer reports

    def _loss(self, dataloader_iter: Any) -> tuple[Tensor, int]:
        """The mean loss of the next micro-batch in nats, and the number of its predictions."""
        ids = self.context.to_device(next(dataloader_iter))["input_ids"]
        # The model itself shifts the labels by one position.
        return self.engine(input_ids=ids, labels=ids).loss, ids[:, 1:].numel()

    def build_training_data_loader(self) -> DataLoader:
        size = self.engine.train_micro_batch_size_per_gpu()
        return DataLoader(self.data["train"], batch_size=size, shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(self.data["test"], batch_size=32)


class Perplexity(MetricReducer):
    """The metrics ``loss`` (nats a token) and ``perplexity``, over the tokens of all ranks."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.nats, self.tokens = 0.0, 0

    def update(self, loss: Tensor, tokens: int) -> None:
        """Add a micro-batch: its mean loss, and its number of predicted tokens."""
        self.nats += float(loss) * tokens
        self.tokens += tokens

    def per_slot_reduce(self) -> tuple[float, int]:
        return self.nats, self.tokens

    def cross_slot_reduce(self, per_slot_metrics: list[tuple[float, int]]) -> dict[str, float]:
        nats, tokens = map(sum, zip(*per_slot_metrics, strict=True))
        return {"loss": nats / tokens, "perplexity": math.exp(nats / tokens)}


def first_on_each_machine(context: DeepSpeedTrialContext, work: Callable[[], T]) -> T:
    """`work` on one rank of each machine; then on the others, which find its results in a cache."""
    is_first = context.distributed.get_local_rank() == 0
    done = [work()] if is_first else []
    context.distributed.allgather_local(None)  # the others wait here
    return done[0] if is_first else work()
