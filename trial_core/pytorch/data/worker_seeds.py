"""The same augmentations after resuming, whatever the number of loader workers.

A worker's generators would otherwise depend on how many samples that worker has handled since it
was started, which no checkpoint knows. Here each micro-batch brings its seed along: a worker seeds
its global generators when it starts to look up the micro-batch's samples. In the main process
(``num_workers=0``) nothing is seeded: augmentations draw from the global generators there, which
the checkpoint does know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import get_worker_info

from trial_core.pytorch.data.index_streams import IndexStream, Wrapper
from trial_core.pytorch.seeding import derive_seed, seed_globals


def seed_micro_batch(seed: int, epoch: int, position: int) -> None:
    """Seed this worker's global generators for a micro-batch; nothing in the main process.

    Args:
        epoch: the epoch that the loader began with, 0 in a run.
        position: the micro-batch's place in the sequence that all ranks share, counted from there:
            what is drawn for it does not depend on the number of ranks either.
    """
    if get_worker_info() is not None:
        seed_globals(derive_seed(seed, "micro-batch", epoch, position))


class SeededIndices(list[int]):
    """Indices of a micro-batch that seed the worker in which they are gone through."""

    def __init__(self, indices: Iterable[int], seed: int, epoch: int, position: int) -> None:
        super().__init__(indices)
        self.seed = seed
        self.epoch = epoch
        self.position = position

    def __iter__(self) -> Iterator[int]:
        # torch's fetcher (and nearly every __getitems__) iterates over them in the worker.
        seed_micro_batch(self.seed, self.epoch, self.position)
        return super().__iter__()


class SeededBatches(Wrapper[Any]):
    """One rank's batches, as `SeededIndices`. Anything but plain lists passes unchanged.

    Args:
        batches: the rank's batches.
        seed: the same on all ranks.
        first: the place of the first batch in the sequence that all ranks share.
        stride: the distance from each batch to the next in that sequence.
    """

    def __init__(self, batches: IndexStream[Any], seed: int, first: int, stride: int) -> None:
        super().__init__(batches)
        self._seed = seed
        self._first = first
        self._stride = stride

    def length(self, epoch: int | None = None) -> int:
        return self.base.length(epoch)

    def iterate(self, epoch: int, start: int = 0, step: int = 1) -> Iterator[Any]:
        position = self._first + start * self._stride
        for batch in self.base.iterate(epoch, start, step):
            if type(batch) is list:
                batch = SeededIndices(batch, self._seed, epoch, position)
            yield batch
            position += step * self._stride
