"""A script with Hugging Face's Trainer: ``hf_script.py FOLDER RANK:STEP WAY [arguments]``.

It trains with one more callback, which opens the run. WAY ``sft`` is TRL's SFTTrainer; ``det`` has
the shape of Determined's hf_trainer examples. It notes rank 0's steps in FOLDER, and once kills
RANK at STEP; ``storage:STEP`` takes the storage away. With ``--load_best_model_at_end`` it notes
the name of the best checkpoint, and the weights after the training.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import trial_core as det
from trial_core.transformers import DetCallback, TrialflowCallback

FOLDER, KILL, WAY, *ARGUMENTS = sys.argv[1:]


class Steps(TrainerCallback):
    """Notes each step of rank 0; kills its rank once."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.process_index == 0:
            with Path(FOLDER, "steps").open("a") as file:
                file.write(f"{json.dumps(state.global_step)}\n")
            if f"storage:{state.global_step}" == KILL:
                Path(FOLDER, "checkpoints").rename(Path(FOLDER, "away"))
                Path(FOLDER, "checkpoints").touch()
        killed = Path(FOLDER, "killed")
        if f"{args.process_index}:{state.global_step}" == KILL and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def trainer(args: TrainingArguments, callback: TrainerCallback) -> Trainer:
    samples = [{"input_ids": ids, "labels": ids} for ids in torch.arange(80).view(10, 8) % 16]
    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    return Trainer(
        model, args, train_dataset=samples, eval_dataset=samples[:2], callbacks=[callback, Steps()]
    )


def sft_trainer() -> Trainer:
    """A tokenizer that it trains itself, and a model of random weights."""
    from datasets import Dataset
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    (args,) = HfArgumentParser(SFTConfig).parse_args_into_dataclasses(ARGUMENTS)
    texts = (__doc__ or "").split("\n\n") * 5
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, vocab_size=300, special_tokens=["<end>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained, eos_token="<end>", pad_token="<end>"
    )
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=1024, n_embd=8, n_layer=1, n_head=1,
        bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return SFTTrainer(
        GPT2LMHeadModel(config), args, train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer, callbacks=[TrialflowCallback(), Steps()],
    )  # fmt: skip


def main() -> None:
    if WAY == "sft":
        sft_trainer().train()
        return
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(ARGUMENTS)
    if WAY != "det":
        trained = trainer(args, TrialflowCallback(user_data={"kept": 1}))
        trained.train()
        if args.load_best_model_at_end and args.process_index == 0:
            best = Path(trained.state.best_model_checkpoint or "").name
            weights = trained.model.transformer.wte.weight.tolist()
            Path(FOLDER, "best.json").write_text(json.dumps([best, weights]))
        return
    assert det.get_cluster_info() is not None
    distributed = det.core.DistributedContext.from_torch_distributed()
    with det.core.init(distributed=distributed) as core_context:
        callback = DetCallback(core_context, args, user_data={"kept": 1})
        resumed = trainer(args, callback)
        resumed.train(resume_from_checkpoint=args.resume_from_checkpoint)


if __name__ == "__main__":
    main()
