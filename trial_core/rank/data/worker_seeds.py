"""Random augmentations that do not depend on when a loader worker was started.

Otherwise a worker's generators would depend on the samples loaded since its start, which no
checkpoint records. Here each micro-batch carries its seed: the worker seeds its global generators
when it starts to load the micro-batch. With ``num_workers=0`` nothing is seeded: augmentations draw
from the rank's global generators, which checkpoints restore.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import get_worker_info

from trial_core.rank.data.seekable_samplers import SamplerWrapper, SeekableSampler
from trial_core.rank.trial.seeding import derive_seed, seed_globals


def seed_micro_batch(seed: int, epoch: int, position: int) -> None:
    """Seed the global generators of this worker for a micro-batch; no effect outside workers.

    Args:
        epoch: the epoch that the loader started with, 0 in a run.
        position: the micro-batch's position in the sequence that all ranks share, counted from that
            epoch. So the augmentations do not depend on the number of ranks either.
    """
    if get_worker_info() is not None:
        seed_globals(derive_seed(seed, "micro-batch", epoch, position))


class SeededIndices(list[int]):
    """Indices of a micro-batch; iterating over them seeds the worker."""

    def __init__(self, indices: Iterable[int], seed: int, epoch: int, position: int) -> None:
        super().__init__(indices)
        self.seed = seed
        self.epoch = epoch
        self.position = position

    def __iter__(self) -> Iterator[int]:
        # torch's fetcher (and nearly every __getitems__) iterates over them in the worker.
        seed_micro_batch(self.seed, self.epoch, self.position)
        return super().__iter__()


class SeededBatches(SamplerWrapper[Any]):
    """One rank's batches as `SeededIndices`; batches that are not lists are not changed.

    In the sequence that all ranks share, `first` is the position of the first batch, and `stride`
    the distance between two of the rank's batches.
    """

    def __init__(self, batches: SeekableSampler[Any], seed: int, first: int, stride: int) -> None:
        super().__init__(batches)
        self._seed = seed
        self._first = first
        self._stride = stride

    def iterate(self, epoch: int, start: int = 0, step: int = 1) -> Iterator[Any]:
        position = self._first + start * self._stride
        for batch in self.base.iterate(epoch, start, step):
            if type(batch) is list:
                batch = SeededIndices(batch, self._seed, epoch, position)
            yield batch
            position += step * self._stride
