"""Iterable datasets: shard, repeat, skip."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from trial_core.errors import TrialError
from trial_core.rank.data.micro_batch_seeds import seed_micro_batch
from trial_core.rank.data.seekable_samplers import length_of, warn_of_length
from trial_core.rank.trial.seeding import derive_seed, isolated, seed_globals


@dataclass(eq=False, kw_only=True)
class ShardedIterable(IterableDataset[Any]):
    """One rank's micro-batches of an iterable dataset, as lists of samples.

    Every rank and every loader worker reads the whole dataset and keeps only its own micro-batches.
    So the micro-batches and their order are the same for any number of ranks and workers, and every
    sample is seen exactly once. The cost: workers divide the work of collating, not of reading.

    The dataset must therefore give all samples in the same order to every rank and worker. It sees
    no ``get_worker_info()``, so that it does not divide itself among workers, and the global
    generators are seeded by (seed, epoch). It must not divide itself among *ranks*. If it has
    ``set_epoch(epoch)``, that is called before each epoch.

    Skipping reads the skipped samples, even whole epochs, unless the dataset has both ``set_epoch``
    and a length. The length must be exact; rank 0 warns at the end of an epoch in which it was not.

    For the arguments see `DataLoader` and its `get_data_loader`. If `batch_size` is None, each
    sample is a micro-batch, not in a list.
    """

    dataset: IterableDataset[Any]
    batch_size: int | None
    drop_last: bool
    repeat: bool
    skip: int
    num_replicas: int
    rank: int
    seed: int
    epoch: int

    def __len__(self) -> int:
        """This rank's micro-batches in one epoch.

        Raises TypeError if the dataset has no length, or is repeated without end.
        """
        if self.repeat:
            raise TypeError("an iterable dataset that is repeated without end has no length")
        total = micro_batches_in(self.dataset, self.batch_size, self.drop_last)
        if total is None:
            raise TypeError(f"object of type {type(self.dataset).__name__!r} has no len()")
        return max(len(range(self.rank, total, self.num_replicas)) - self.skip, 0)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        # torch reads one micro-batch from each worker in turn: every `workers`-th of the rank's.
        position = (self.skip + worker) * self.num_replicas + self.rank
        stride = workers * self.num_replicas
        epoch, start = self._locate(position)
        shard = itertools.islice(self._all_micro_batches(epoch), start, None, stride)
        for micro_batch in isolated(shard):
            seed_micro_batch(self.seed, self.epoch, position)  # for the collate function
            yield micro_batch
            position += stride

    def _locate(self, start: int) -> tuple[int, int]:
        """The epoch to start with, and the number of micro-batches from there to `start`."""
        epoch = self.epoch
        if not self.repeat or not hasattr(self.dataset, "set_epoch"):
            return epoch, start
        while True:
            with _no_worker_info():
                self.dataset.set_epoch(epoch)
                length = micro_batches_in(self.dataset, self.batch_size, self.drop_last)
            if not length or start < length:
                return epoch, start
            epoch, start = epoch + 1, start - length

    def _all_micro_batches(self, first_epoch: int) -> Iterator[Any]:
        """The micro-batches of all ranks. Seeds the global generators: iterate over it isolated."""
        for epoch in itertools.count(first_epoch):
            is_empty = True
            for micro_batch in self._one_epoch(epoch):
                is_empty = False
                yield micro_batch
            if not self.repeat:
                return
            if is_empty:
                raise TrialError(
                    f"{type(self.dataset).__qualname__} gave no sample in epoch {epoch}, or fewer "
                    "than one batch with drop_last=True; an iterable dataset must give all samples "
                    "each time iter() is called on it"
                )

    def _one_epoch(self, epoch: int) -> Iterator[Any]:
        seed_globals(derive_seed(self.seed, "stream", epoch))
        info = get_worker_info()
        warns = self.repeat and self.rank == 0 and (info is None or info.id == 0)
        length = None
        with _no_worker_info():
            if hasattr(self.dataset, "set_epoch"):  # by whose length epochs are entered
                self.dataset.set_epoch(epoch)
                length = length_of(self.dataset) if warns else None
            samples = iter(self.dataset)
        size = 1 if self.batch_size is None else self.batch_size
        count = 0
        while True:
            with _no_worker_info():
                batch = list(itertools.islice(samples, size))
            count += len(batch)
            if not batch or (self.drop_last and len(batch) < size):
                warn_of_length(self.dataset, epoch, length, count)
                return
            yield batch[0] if self.batch_size is None else batch


def micro_batches_in(dataset: Any, batch_size: int | None, drop_last: bool) -> int | None:
    """Micro-batches in one epoch of an iterable dataset, all ranks together; None if unknown."""
    samples, size = length_of(dataset), 1 if batch_size is None else batch_size
    if samples is None:
        return None
    return samples // size if drop_last else -(-samples // size)


@contextmanager
def _no_worker_info() -> Iterator[None]:
    # torch has no public way to keep a dataset from dividing itself among workers.
    info = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info
