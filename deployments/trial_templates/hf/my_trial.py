"""Trains a small language model of Hugging Face's transformers: pip install 'trialflow[hf]'.

Loads nothing from the network.
"""

import random
from pydoc_data.topics import topics
from typing import Any, cast

import deepspeed
import torch
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from trial_core.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext, overwrite_deepspeed_config
from trial_core.pytorch import DataLoader


class MyTrial(DeepSpeedTrial):
    """Each rank has one instance: the model, how it learns from a batch, and its data."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.window = context.get_hparam("window")  # from experiment.yaml
        # A new model. To fine-tune a published one: AutoModelForCausalLM.from_pretrained(NAME),
        # and its tokenizer in `windows`, in place of bytes.
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=256,  # a token is a byte
                n_positions=self.window,
                n_embd=context.get_hparam("width"),
                n_layer=context.get_hparam("layers"),
                n_head=context.get_hparam("heads"),
                # Without dropout, training and validation measure the same model.
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=None,
                eos_token_id=None,
                use_cache=False,
            )
        )
        config = overwrite_deepspeed_config(
            "ds_config.json", {"optimizer": {"params": {"lr": context.get_hparam("lr")}}}
        )
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        self.engine = context.wrap_model_engine(engine)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss = self._loss(dataloader_iter)
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": self._loss(dataloader_iter)}  # the mean: each batch counts the same

    def _loss(self, dataloader_iter: Any) -> torch.Tensor:
        """The mean loss of the next tokens, in nats."""
        (tokens,) = self.context.to_device(next(dataloader_iter))
        # The model itself shifts the labels by one position.
        return cast(torch.Tensor, self.engine(input_ids=tokens, labels=tokens).loss)

    def build_training_data_loader(self) -> DataLoader:
        batch_size = self.engine.train_micro_batch_size_per_gpu()  # train_batch_size / ranks
        training = windows(self.window, slice(None, -500))
        return DataLoader(training, batch_size=batch_size, shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(windows(self.window, slice(-500, None)), batch_size=50)


def windows(length: int, part: slice) -> TensorDataset:
    """A part of the text, in windows of `length` tokens. Replace the text with yours.

    The text is the language reference that comes with Python, 370,000 bytes. Its topics quote each
    other, so each paragraph is taken once: validation has no text of training. The order is random:
    both have text of all topics.
    """
    paragraphs = list(dict.fromkeys("\n\n".join(topics.values()).split("\n\n")))
    random.Random(0).shuffle(paragraphs)
    tokens = torch.tensor(list("\n\n".join(paragraphs).encode()))
    return TensorDataset(tokens.unfold(0, length, length)[part])
