"""The work of every contestant: one model, the same samples, and a record of each batch.

A batch has a micro-batch for each rank at first, which one rank alone also trains. So a run may
continue bit for bit on it, if its contestant shares samples so.
"""

from __future__ import annotations

import itertools
import json
import os
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler, TensorDataset

from benchmarks.models import SAMPLES, Small

MICRO_BATCH_SAMPLES = Small.micro_batch_size
LEARNING_RATE = 1e-3
VARIABLE = "GOODPUT_JOB"


@dataclass(frozen=True)
class Job:
    """The task, the same for all contestants, in an environment variable.

    Attributes:
        folder: for the records, and the contestant's other files.
        bucket: an empty bucket, ``s3://…``; its endpoint and keys are in AWS's own variables.
        batches: the number of batches of the whole run.
        batch_seconds: the shortest time of a batch.
        save_every: batches between checkpoints.
        stall_seconds: the time without a batch, or in a collective, after which ranks hang.
        micro_batches: the number of micro-batches of a batch, of all ranks together.
        restarts: how often ranks may be launched again.
    """

    folder: str
    bucket: str
    batches: int
    batch_seconds: float
    save_every: int
    stall_seconds: float
    micro_batches: int = 2
    restarts: int = 1000

    @classmethod
    def given(cls) -> Job:
        """Return the job in this process's environment."""
        return cls(**json.loads(os.environ[VARIABLE]))

    @property
    def batch_samples(self) -> int:
        return MICRO_BATCH_SAMPLES * self.micro_batches

    @property
    def batches_per_epoch(self) -> int:
        return SAMPLES // self.batch_samples

    @property
    def environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}


def new_model() -> Small:
    """Return the model, with the same weights in each process."""
    torch.manual_seed(0)
    return Small()


def dataset() -> TensorDataset:
    """Return the samples, the same in each process: (window + 1,) bytes as int64."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randint(256, (SAMPLES, Small.window + 1), generator=generator))


class MicroBatches(Sampler[list[int]]):
    """Yields a rank's micro-batches from batch `start` on, without end, for hand-written loops.

    The order depends on the epoch alone. A single rank has the micro-batches of all, in turn.
    """

    def __init__(self, job: Job, rank: int, ranks: int, start: int) -> None:
        self._job, self._start = job, start
        self._share = range(rank, job.micro_batches, ranks)

    def __iter__(self) -> Iterator[list[int]]:
        shape = (self._job.batches_per_epoch, self._job.micro_batches, MICRO_BATCH_SAMPLES)
        for batch in itertools.count(self._start):
            epoch, place = divmod(batch, self._job.batches_per_epoch)
            order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
            micro_batches = order.view(shape)[place]
            for each in self._share:
                yield micro_batches[each].tolist()


class Recorder:
    """Gives each batch its length, and notes it. Every rank has a recorder.

    Args:
        rank: this rank's number.
        start: batches that were trained before.
    """

    def __init__(self, job: Job, rank: int, start: int = 0) -> None:
        self._job, self._rank, self._trained = job, rank, start
        self._began = time.monotonic()

    def batch_ended(self, model: nn.Module) -> int:
        """Wait until the batch has its length, and note it. Return the batches trained so far.

        Hangs if the harness has left the file that asks for it.
        """
        left = self._began + self._job.batch_seconds - time.monotonic()
        if left > 0:
            time.sleep(left)
        self._trained += 1
        weights = digest(model.parameters()) if self._rank == 0 else 0
        with Path(self._job.folder, f"rank-{self._rank}.txt").open("a") as file:
            file.write(f"{self._trained} {time.time()} {os.getpid()} {weights}\n")
        hang = hang_file(self._job, self._rank)
        if hang.exists():
            hang.unlink()
            time.sleep(3600)
        self._began = time.monotonic()
        return self._trained


def hang_file(job: Job, rank: int) -> Path:
    """Return the path of a file: while it exists, that rank hangs after its next batch."""
    return Path(job.folder, f"hang-{rank}")


def digest(parameters: Iterator[Tensor]) -> int:
    """Return a checksum of all bits of the weights."""
    value = 0
    for parameter in parameters:
        value = zlib.crc32(parameter.detach().numpy().tobytes(), value)
    return value
