"""A loop with Accelerate, under torchrun; `save_state`, then an upload with boto3.

After Accelerate's guide "Checkpointing": `load_state`, and `skip_first_batches` in a begun epoch.
"""

from __future__ import annotations

import tempfile
from datetime import timedelta
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, InitProcessGroupKwargs, set_seed
from torch.optim import Adam
from torch.utils.data import DataLoader

from benchmarks.goodput.s3_folders import download, upload
from benchmarks.goodput.workload import (
    LEARNING_RATE,
    MICRO_BATCH_SAMPLES,
    Job,
    Recorder,
    dataset,
    new_model,
)


def train(job: Job, accelerator: Accelerator) -> None:
    """Train to the last batch. Collective: every rank calls this."""
    set_seed(0)
    module = new_model()
    model, optimizer, loader = accelerator.prepare(
        module,
        Adam(module.parameters(), LEARNING_RATE),
        DataLoader(dataset(), batch_size=MICRO_BATCH_SAMPLES, shuffle=True),
    )
    with tempfile.TemporaryDirectory() as folder:  # each rank fetches, as on several machines
        trained = download(Path(folder), job.bucket)
        if trained:
            accelerator.load_state(folder)
    recorder = Recorder(job, accelerator.process_index, trained)
    while trained < job.batches:
        epoch, place = divmod(trained, job.batches_per_epoch)
        loader.set_epoch(epoch)
        skipped = place * accelerator.gradient_accumulation_steps
        for (batch,) in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                trained = recorder.batch_ended(module)
                if trained % job.save_every == 0:
                    save(job, accelerator, trained)
                if trained == job.batches:
                    break


def save(job: Job, accelerator: Accelerator, trained: int) -> None:
    """Save to a folder that all ranks share; the main process uploads it."""
    folder = Path(job.folder, "accelerate", str(trained))
    accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        upload(folder, job.bucket, trained)
    accelerator.wait_for_everyone()


def main() -> None:
    job = Job.given()
    timeout = InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=job.stall_seconds))
    accelerator = Accelerator(
        cpu=True,
        kwargs_handlers=[timeout],
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    accelerator.gradient_accumulation_steps = job.micro_batches // accelerator.num_processes
    train(job, accelerator)
    accelerator.end_training()


if __name__ == "__main__":
    main()
