"""Trains a small language model of Hugging Face's transformers: pip install 'trialflow[hf]'.

Loads nothing from the network.
"""

from pydoc_data.topics import topics
from typing import Any, cast

import deepspeed
import torch
from datasets import Dataset, DatasetDict
from transformers import AutoModelForCausalLM, ByT5Tokenizer, LlamaConfig

from trial_core.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext, overwrite_deepspeed_config
from trial_core.pytorch import DataLoader


class MyTrial(DeepSpeedTrial):
    """Each rank has one instance: the model, how it learns from a batch, and its data."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        width = context.get_hparam("width")  # from experiment.yaml
        # A new tokenizer, whose tokens are bytes, and a new model. To fine-tune a published one:
        # AutoTokenizer.from_pretrained(NAME), and AutoModelForCausalLM.from_pretrained(NAME).
        tokenizer = ByT5Tokenizer(extra_ids=0)
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=width,
                intermediate_size=3 * width,
                num_hidden_layers=context.get_hparam("layers"),
                num_attention_heads=context.get_hparam("heads"),
            )
        )
        # ZeRO-3 has divided it among the ranks already: the experiment names this config.
        config = overwrite_deepspeed_config(
            context.get_hparam("deepspeed_config"),
            {"optimizer": {"params": {"lr": context.get_hparam("lr")}}},
        )
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        self.engine = context.wrap_model_engine(engine)
        context.set_tokenizer(tokenizer)  # goes with the model: trialflow export best --format hf
        window = context.get_hparam("window")
        context.set_work_per_sample(tokens=window)  # so that tokens a second are shown
        self.data = windows(tokenizer, window)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss = self._loss(dataloader_iter)
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": self._loss(dataloader_iter)}  # the mean: each batch counts the same

    def _loss(self, dataloader_iter: Any) -> torch.Tensor:
        """The mean loss of the next tokens, in nats."""
        tokens = self.context.to_device(next(dataloader_iter))["input_ids"]
        # The model itself shifts the labels by one position.
        return cast(torch.Tensor, self.engine(input_ids=tokens, labels=tokens).loss)

    def build_training_data_loader(self) -> DataLoader:
        batch_size = self.engine.train_micro_batch_size_per_gpu()  # train_batch_size / ranks
        return DataLoader(self.data["train"], batch_size=batch_size, shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(self.data["test"], batch_size=50)


def windows(tokenizer: Any, length: int) -> DatasetDict:
    """The sets "train" and "test", in rows of `length` tokens. Replace the text with yours.

    The text is the language reference that comes with Python, 370,000 bytes. Its topics quote each
    other, so each paragraph is taken once: validation has no text of training.
    """

    def cut(rows: dict[str, list[str]]) -> dict[str, Any]:
        tokens = tokenizer("\n\n".join(rows["text"]))["input_ids"]
        starts = range(0, len(tokens) - length + 1, length)
        return {"input_ids": [tokens[start : start + length] for start in starts]}

    paragraphs = list(dict.fromkeys("\n\n".join(topics.values()).split("\n\n")))
    split = Dataset.from_dict({"text": paragraphs}).train_test_split(0.1, seed=0)
    return split.map(cut, batched=True, remove_columns="text").with_format("torch")
