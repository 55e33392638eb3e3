"""A script in the shape of Determined's hf_trainer examples: a Trainer, and `DetCallback`."""

from __future__ import annotations

import json
import os
import signal
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
from trial_core.transformers import DetCallback


class Steps(TrainerCallback):
    """Notes each step of rank 0; kills its rank once, if a hyperparameter says so."""

    def __init__(self, folder: str, kill_at: int) -> None:
        self.file, self.killed, self.kill_at = Path(folder) / "steps", Path(folder) / "k", kill_at

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with self.file.open("a") as file:
            file.write(f"{json.dumps(state.global_step)}\n")
        if state.global_step == self.kill_at and not self.killed.exists():
            self.killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    info = det.get_cluster_info()
    assert info is not None
    hparams = info.trial.hparams
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    samples = [{"input_ids": ids, "labels": ids} for ids in torch.arange(64).view(8, 8) % 16]
    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    distributed = det.core.DistributedContext.from_torch_distributed()
    with det.core.init(distributed=distributed) as core_context:
        callbacks = [DetCallback(core_context, args, user_data={"kept": 1})]
        if distributed.rank == 0:
            callbacks.append(Steps(hparams["record"], hparams.get("kill_at", -1)))
        trainer = Trainer(
            model=model, args=args, train_dataset=samples, eval_dataset=samples[:2],
            callbacks=callbacks,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        if distributed.rank == 0:
            weights = model.state_dict()
            torch.save(weights, Path(hparams["record"]) / "weights.pt")


if __name__ == "__main__":
    main()
