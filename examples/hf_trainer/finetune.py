"""Hugging Face's Trainer teaches a small GPT-2 Python's source text, byte by byte."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

from trial_core.transformers import TrialflowCallback

WINDOW = 64  # bytes


def samples() -> list[dict[str, torch.Tensor]]:
    """Windows of bytes of a module of the standard library, which needs no download."""
    text = bytearray(Path(argparse.__file__).read_bytes())
    windows = torch.frombuffer(text, dtype=torch.uint8).long().split(WINDOW)[:-1]
    return [{"input_ids": each, "labels": each} for each in windows]


def main() -> None:
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(use_cpu=get_accelerator().device_name() == "cpu")
    (args,) = parser.parse_args_into_dataclasses()
    torch.manual_seed(args.seed)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256, n_positions=WINDOW, n_embd=32, n_layer=2, n_head=2,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    data = samples()
    trainer = Trainer(
        model, args, train_dataset=data[64:], eval_dataset=data[:64],
        callbacks=[TrialflowCallback()],  # the only line for trialflow
    )  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    main()
