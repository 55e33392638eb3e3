"""Lightning's Trainer with its `ModelCheckpoint` on S3, under torchrun.

After its guides: ``save_last``, a path for ``ckpt_path``, and torchdata's loader and sampler. Their
position is in the checkpoint. (``ckpt_path="last"`` finds no checkpoint on S3: a run would begin
anew, with a warning.)
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import fsspec
import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.optim import Adam, Optimizer
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from benchmarks.goodput.workload import (
    LEARNING_RATE,
    MICRO_BATCH_SAMPLES,
    Job,
    Recorder,
    dataset,
    new_model,
)


class Module(lightning.LightningModule):  # type: ignore[misc]  # it ships no types here
    """The model, and the optimizer of all contestants."""

    def __init__(self) -> None:
        super().__init__()
        self.model = new_model()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch[0])
        return loss

    def configure_optimizers(self) -> Optimizer:
        return Adam(self.parameters(), LEARNING_RATE)


class Recording(lightning.Callback):  # type: ignore[misc]
    """Notes each step of the optimizer. It comes before the checkpoint callback."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._recorder = Recorder(self._job, trainer.global_rank, trainer.global_step)
        self._steps = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step > self._steps:
            self._steps = self._recorder.batch_ended(pl_module.model)


def has_file(url: str) -> bool:
    """Return whether that object exists."""
    found: bool = fsspec.filesystem("s3").exists(url)
    return found


def main() -> None:
    job = Job.given()
    ranks = int(os.environ["WORLD_SIZE"])
    lightning.seed_everything(0)
    folder = f"{job.bucket}/lightning"
    checkpoints = ModelCheckpoint(
        dirpath=folder, every_n_train_steps=job.save_every, save_last=True,
        enable_version_counter=False,
    )  # fmt: skip
    latest = f"{folder}/last.ckpt"
    trainer = lightning.Trainer(
        accelerator="cpu", devices=ranks,
        strategy=DDPStrategy(
            process_group_backend="gloo", timeout=timedelta(seconds=job.stall_seconds)
        ),
        accumulate_grad_batches=job.micro_batches // ranks, max_steps=job.batches, max_epochs=-1,
        callbacks=[Recording(job), checkpoints], default_root_dir=job.folder,
        use_distributed_sampler=False, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    samples = dataset()
    # With Lightning's own sampler, a resumed run reads the samples in another order.
    sampler = StatefulDistributedSampler(samples, ranks, int(os.environ["RANK"]), seed=0)
    loader = StatefulDataLoader(samples, batch_size=MICRO_BATCH_SAMPLES, sampler=sampler)
    trainer.fit(Module(), loader, ckpt_path=latest if has_file(latest) else None)


if __name__ == "__main__":
    main()
