"""A loop around a DeepSpeed engine, under torchrun; `save_checkpoint`, then an upload with boto3.

After DeepSpeed's "Getting started": `load_checkpoint` returns the step, to which data are advanced.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch.distributed as dist
from torch.utils.data import DataLoader

from benchmarks.goodput.s3_folders import download, upload
from benchmarks.goodput.workload import (
    LEARNING_RATE,
    MICRO_BATCH_SAMPLES,
    Job,
    MicroBatches,
    Recorder,
    dataset,
    new_model,
)
from trial_core.deepspeed.op_builds import prepare_op_builds


def config(job: Job) -> dict[str, Any]:
    """Return DeepSpeed's configuration."""
    return {
        "train_batch_size": job.batch_samples,
        "train_micro_batch_size_per_gpu": MICRO_BATCH_SAMPLES,
        "optimizer": {"type": "Adam", "params": {"lr": LEARNING_RATE, "torch_adam": True}},
    }


def train(job: Job, folder: Path) -> None:
    """Train to the last batch. Collective: every rank calls this.

    Args:
        folder: one that all ranks share, for checkpoints.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = new_model()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config(job)
    )
    if rank == 0:
        download(folder, job.bucket)
    dist.barrier()
    _, state = engine.load_checkpoint(str(folder)) if (folder / "latest").exists() else (None, {})
    trained: int = state.get("step", 0)
    recorder = Recorder(job, rank, trained)
    batches = iter(DataLoader(dataset(), batch_sampler=MicroBatches(job, rank, ranks, trained)))
    while trained < job.batches:
        for _ in range(engine.gradient_accumulation_steps()):
            (batch,) = next(batches)
            engine.backward(engine(batch))
            engine.step()
        trained = recorder.batch_ended(model)
        if trained % job.save_every == 0:
            saved = folder / f"after-{trained}"
            engine.save_checkpoint(str(saved), client_state={"step": trained})
            if rank == 0:
                upload(saved, job.bucket, trained)
            dist.barrier()


def main() -> None:
    job = Job.given()
    # DeepSpeed would wait for ever for the lock of a build that was killed.
    prepare_op_builds()
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=job.stall_seconds))
    # Each launch has its own folder: a half-written one of a killed launch is not read.
    launch = f"{os.environ['TORCHELASTIC_RUN_ID']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    folder = Path(job.folder, "deepspeed", launch)
    folder.mkdir(parents=True, exist_ok=True)
    train(job, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
