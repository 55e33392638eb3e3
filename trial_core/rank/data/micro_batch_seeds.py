"""Random numbers of a micro-batch that depend on its position alone, and its dataset's epoch.

Augmentations do not depend on when a loader worker was started: otherwise its generators would
depend on the samples loaded since then, which no checkpoint records. Here each micro-batch carries
its seed: the worker seeds its global generators when it starts to load the micro-batch. With
``num_workers=0`` nothing is seeded: augmentations draw from the rank's global generators, which
checkpoints restore.

All ranks that load a micro-batch draw the same: the first stage of a pipeline needs its inputs, and
the last stage its labels. If loading draws random numbers (noise, masked words), both must draw the
same ones, although the models of the two ranks draw different ones. So there, loading gets separate
generators, seeded for each micro-batch.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.data.seekable_samplers import SamplerWrapper, SeekableSampler
from trial_core.rank.trial.seeding import derive_seed, isolated, seed_globals
from trial_core.rank.trial.trial_adapter import TrialAdapter


def seed_micro_batch(seed: int, epoch: int, position: int) -> None:
    """Seed the global generators of this worker for a micro-batch; no effect outside workers.

    `position` is the micro-batch's in the sequence that all ranks share, so that augmentations do
    not depend on their number. It counts from `epoch`, with which the loader started: 0 in a run.
    """
    if get_worker_info() is not None:
        seed_globals(derive_seed(seed, "micro-batch", epoch, position))


_told: tuple[int, int | None] | None = None
"""The last epoch that this worker has told its dataset, after its process id: workers are forks."""


def epoch_setters(dataset: Any) -> list[Callable[[int], object]]:
    """``set_epoch`` of a map-style dataset, or of the datasets in a ``Subset`` and the like."""
    if callable(setter := getattr(dataset, "set_epoch", None)):
        return [setter]
    inner = [getattr(dataset, "dataset", None), *(getattr(dataset, "datasets", None) or ())]
    return [each for part in inner if isinstance(part, Dataset) for each in epoch_setters(part)]


class SeededIndices(list[int]):
    """Indices of a micro-batch; iterating over them seeds the worker as `seed_micro_batch` with
    `place`, and tells its dataset `of_epoch`, unless that is None."""

    def __init__(
        self, indices: Iterable[int], place: tuple[int, int, int], of_epoch: int | None = None
    ) -> None:
        super().__init__(indices)
        self.place, self.of_epoch = place, of_epoch

    def __iter__(self) -> Iterator[int]:
        # torch's fetcher (and nearly every __getitems__) iterates over them in the worker.
        global _told  # a worker has one dataset
        seed_micro_batch(*self.place)
        worker, now = get_worker_info(), (os.getpid(), self.of_epoch)
        if worker is not None and self.of_epoch is not None and _told != now:
            _told = now
            for tell in epoch_setters(worker.dataset):
                tell(self.of_epoch)
        return super().__iter__()


class SeededBatches(SamplerWrapper[Any]):
    """One rank's batches as `SeededIndices`; batches that are not lists are not changed.

    In the sequence that all ranks share, `first` is the position of the first batch, and `stride`
    the distance between two of the rank's batches. With `per_epoch`, the batches of all ranks in an
    epoch, the dataset is told the epoch: by workers, or by `tell_here` if this process loads.
    """

    def __init__(
        self,
        batches: SeekableSampler[Any],
        seed: int,
        first: int,
        stride: int,
        per_epoch: int | None = None,
        tell_here: Iterable[Callable[[int], object]] = (),
    ) -> None:
        super().__init__(batches)
        self._seed = seed
        self._first = first
        self._stride = stride
        self._per_epoch = per_epoch
        self._tell_here = [*tell_here]

    def iterate(self, epoch: int, start: int = 0, step: int = 1) -> Iterator[Any]:
        position = self._first + start * self._stride
        told = of_epoch = None
        for batch in self.base.iterate(epoch, start, step):
            if self._per_epoch:
                of_epoch = epoch + position // self._per_epoch
                if of_epoch != told:
                    for tell in self._tell_here:  # the batch is loaded next, here
                        tell(of_epoch)
                    told = of_epoch
            if type(batch) is list:
                batch = SeededIndices(batch, (self._seed, epoch, position), of_epoch)
            yield batch
            position += step * self._stride


def with_shared_rng(
    micro_batches: Iterable[Any],
    adapter: TrialAdapter,
    distributed: DistributedContext,
    seed: int,
    epoch: int = 0,
    skipped: int = 0,
) -> Iterable[Any]:
    """`micro_batches`, loaded with the same random numbers on all ranks that share a data shard.

    Returns `micro_batches` itself if every rank has its own shard. `skipped` micro-batches of this
    rank came before these, from the beginning of `epoch`.
    """
    if adapter.data_parallel_size == distributed.get_size():
        return micro_batches
    return _SharedRngLoader(
        micro_batches,
        seed,
        epoch,
        first=skipped * adapter.data_parallel_size + adapter.data_parallel_rank,
        stride=adapter.data_parallel_size,
    )


@dataclass
class _SharedRngLoader:
    source: Iterable[Any]
    seed: int
    epoch: int
    first: int
    stride: int

    def __iter__(self) -> Iterator[Any]:
        return isolated(self._seeded())

    def _seeded(self) -> Iterator[Any]:
        source = iter(self.source)
        for position in itertools.count(self.first, self.stride):
            seed_globals(derive_seed(self.seed, "micro-batch", self.epoch, position))
            try:
                micro_batch = next(source)
            except StopIteration:
                return
            yield micro_batch
