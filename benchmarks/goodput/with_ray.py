"""Ray Train v2: `TorchTrainer` with a `FailureConfig`, on a Ray cluster of this process.

After its guides: a run of the same name and storage continues from the latest checkpoint, also when
the driver is started again.
"""

from __future__ import annotations

import os
import sys
import tempfile
import urllib.parse
from pathlib import Path

import ray
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch.optim import Adam
from torch.utils.data import DataLoader

from benchmarks.goodput.workload import (
    LEARNING_RATE,
    Job,
    MicroBatches,
    Recorder,
    dataset,
    new_model,
)


def train() -> None:
    """Train to the last batch. Every worker runs this."""
    job, context = Job.given(), ray.train.get_context()
    rank, ranks = context.get_world_rank(), context.get_world_size()
    module = new_model()
    optimizer, trained = Adam(module.parameters(), LEARNING_RATE), 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "state.pt"))
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        trained = state["trained"]
    model = prepare_model(module)
    recorder = Recorder(job, rank, trained)
    batches = iter(DataLoader(dataset(), batch_sampler=MicroBatches(job, rank, ranks, trained)))
    parts = job.micro_batches // ranks
    while trained < job.batches:
        for _ in range(parts):
            (batch,) = next(batches)
            (model(batch) / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
        trained = recorder.batch_ended(module)
        if trained % job.save_every == 0:
            save(module, optimizer, trained, rank)


def save(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, trained: int, rank: int
) -> None:
    """Report a checkpoint, which rank 0 writes. Collective: every worker calls this."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if rank == 0:
            state = {
                "model": module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "trained": trained,
            }
            torch.save(state, Path(folder, "state.pt"))
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report({"trained": trained}, checkpoint=checkpoint)


def main() -> None:
    """Train on as many workers as the argument says."""

    job = Job.given()
    endpoint = urllib.parse.quote(os.environ["AWS_ENDPOINT_URL"], safe="")
    ray.init(num_cpus=job.micro_batches, object_store_memory=2**27)
    TorchTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=int(sys.argv[1])),
        torch_config=TorchConfig("gloo", timeout_s=int(job.stall_seconds)),
        run_config=RunConfig(
            name="goodput",
            storage_path=f"{job.bucket}?endpoint_override={endpoint}",
            failure_config=FailureConfig(max_failures=job.restarts),
        ),
    ).fit()


if __name__ == "__main__":
    main()
