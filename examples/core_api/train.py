"""Classifies scikit-learn's handwritten digits in a plain torch loop, as a Core API script.

trialflow train experiment.yaml      all GPUs or two CPU slots, Prefect, report, restarts
python train.py                      one process, nothing else
torchrun --nproc-per-node 2 train.py
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trial_core
from trial_core import core

EXPERIMENT = {"name": "digits-core-api", "searcher": {"metric": "accuracy"}}
"""For runs without an experiment file."""

HELD_OUT = 360


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images (64 values from 0 to 1) and labels, in a fixed random order."""
    source = load_digits()
    order = torch.randperm(len(source.target), generator=torch.Generator().manual_seed(0))
    images = torch.as_tensor(source.data, dtype=torch.float32) / 16
    return images[order], torch.as_tensor(source.target)[order]


def batches(samples: int, size: int, begin: int) -> Iterator[torch.Tensor]:
    """Endless batches of indices from batch `begin` on; each depends on its number alone."""
    step = begin
    while True:
        yield torch.randint(samples, (size,), generator=torch.Generator().manual_seed(step))
        step += 1


def train(context: core.Context, steps: int, period: int, batch_size: int) -> None:
    """Train up to `steps`; validate, report and store every `period` steps."""
    rank, ranks = context.distributed.rank, context.distributed.size
    images, labels = digits()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    done = 0
    if context.info.latest_checkpoint is not None:
        with context.checkpoint.restore_path(context.info.latest_checkpoint) as path:
            state = torch.load(path / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    trained = DistributedDataParallel(model) if ranks > 1 else model

    def store(step: int) -> None:
        if rank == 0:
            with context.checkpoint.store_path({"steps_completed": step}) as (path, _):
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "step": step}, path / "state.pt")

    for indices in batches(len(images) - HELD_OUT, batch_size, done):
        if done >= steps:
            break
        own = indices[rank::ranks] + HELD_OUT
        loss = nn.functional.cross_entropy(trained(images[own]), labels[own])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done += 1
        should_stop = context.preempt.should_preempt()
        if done % period == 0 or done == steps:
            if rank == 0:
                with torch.no_grad():
                    hits = model(images[:HELD_OUT]).argmax(1) == labels[:HELD_OUT]
                context.train.report_training_metrics(done, {"loss": loss})
                context.train.report_validation_metrics(done, {"accuracy": hits.float().mean()})
            store(done)
        elif should_stop:
            store(done)
        if should_stop:
            break


def main() -> None:
    """Read the arguments, and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--period", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=64)
    given = parser.parse_args()
    is_one_of_several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if is_one_of_several and not dist.is_initialized():
        dist.init_process_group()
    with trial_core.init(exp_conf=EXPERIMENT, latest_checkpoint="latest") as context:
        train(context, given.steps, given.period, given.batch_size)


if __name__ == "__main__":
    main()
