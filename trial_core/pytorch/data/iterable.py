"""Iterable datasets, sharded, repeated and skipped."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from trial_core.errors import TrialError
from trial_core.pytorch.data.index_streams import length_of
from trial_core.pytorch.data.worker_seeds import seed_micro_batch
from trial_core.pytorch.seeding import derive_seed, isolated, seed_globals


class ShardedIterable(IterableDataset[Any]):
    """One rank's micro-batches of an iterable dataset, as lists of samples.

    Every rank and every loader worker goes through the whole dataset and keeps the micro-batches
    that are its own. So micro-batches are the same, and come in the same order, for any number of
    ranks and workers, and every sample is seen exactly once. The price is that workers do not
    divide the work of reading; they divide that of collating.

    For this the dataset must give everything to everybody, in the same order: it finds
    ``get_worker_info()`` to be None (a dataset that would divide itself among workers does not),
    and the global generators are seeded alike, by (seed, epoch). Dividing itself among *ranks* is
    what it must not do. Its ``set_epoch(epoch)`` is called before each pass, if it has one.

    Skipping goes through what is skipped: whole epochs too, unless the dataset has both
    ``set_epoch`` and a length.

    Args:
        dataset: the user's dataset.
        batch_size: samples in a micro-batch; None: each sample is one, and comes without a list.
        drop_last: leave out an epoch's last micro-batch if it is smaller than the others.
        repeat: go on from each epoch into the next, without end.
        skip: micro-batches of this rank that have been consumed already.
        num_replicas: data-parallel ranks.
        rank: this rank among them.
        seed: the same on all ranks.
        epoch: the first epoch.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        *,
        batch_size: int | None,
        drop_last: bool,
        repeat: bool,
        skip: int,
        num_replicas: int,
        rank: int,
        seed: int,
        epoch: int,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.repeat = repeat
        self.skip = skip
        self.num_replicas = num_replicas
        self.rank = rank
        self.seed = seed
        self.epoch = epoch

    def __len__(self) -> int:
        """This rank's micro-batches in one pass.

        Raises:
            TypeError: the dataset has no length, or its passes are repeated without end.
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
        # torch takes one micro-batch from each worker in turn, so taking every `workers`-th of
        # the rank's own gives them in order.
        position = (self.skip + worker) * self.num_replicas + self.rank
        stride = workers * self.num_replicas
        epoch, start = self._locate(position)
        own = itertools.islice(self._all(epoch), start, None, stride)
        for micro_batch in isolated(own):
            seed_micro_batch(self.seed, self.epoch, position)  # what collating draws
            yield micro_batch
            position += stride

    def _locate(self, start: int) -> tuple[int, int]:
        """The epoch to begin with, and how many micro-batches from there to `start`."""
        epoch = self.epoch
        if not self.repeat or not hasattr(self.dataset, "set_epoch"):
            return epoch, start
        while True:
            self.dataset.set_epoch(epoch)
            length = micro_batches_in(self.dataset, self.batch_size, self.drop_last)
            if not length or start < length:
                return epoch, start
            epoch, start = epoch + 1, start - length

    def _all(self, first_epoch: int) -> Iterator[Any]:
        """Every rank's micro-batches. Runs on generators of its own."""
        for epoch in itertools.count(first_epoch):
            empty = True
            for micro_batch in self._one_pass(epoch):
                empty = False
                yield micro_batch
            if not self.repeat:
                return
            if empty:
                raise TrialError(
                    f"{type(self.dataset).__qualname__} gave no sample in epoch {epoch}, or fewer "
                    "than one batch with drop_last=True; an iterable dataset must give its samples "
                    "anew each time iter() is called on it"
                )

    def _one_pass(self, epoch: int) -> Iterator[Any]:
        seed_globals(derive_seed(self.seed, "stream", epoch))
        with _no_worker_info():
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)
            samples = iter(self.dataset)
        size = 1 if self.batch_size is None else self.batch_size
        while True:
            with _no_worker_info():
                batch = list(itertools.islice(samples, size))
            if not batch or (self.drop_last and len(batch) < size):
                return
            yield batch[0] if self.batch_size is None else batch


def micro_batches_in(dataset: Any, batch_size: int | None, drop_last: bool) -> int | None:
    """Micro-batches in one pass over all shards of an iterable dataset; None when unknown."""
    samples, size = length_of(dataset), 1 if batch_size is None else batch_size
    if samples is None:
        return None
    return samples // size if drop_last else -(-samples // size)


@contextmanager
def _no_worker_info() -> Iterator[None]:
    # torch has no public way to say that a dataset is not to divide itself among workers.
    info = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info
