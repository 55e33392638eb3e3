"""Random numbers of a micro-batch that depend on its position alone.

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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import get_worker_info

from trial_core.rank.collectives.distributed import DistributedContext
from trial_core.rank.data.seekable_samplers import SamplerWrapper, SeekableSampler
from trial_core.rank.trial.seeding import derive_seed, isolated, seed_globals
from trial_core.rank.trial.trial_adapter import TrialAdapter


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


def with_shared_rng(
    micro_batches: Iterable[Any],
    adapter: TrialAdapter,
    distributed: DistributedContext,
    seed: int,
    skipped: int = 0,
) -> Iterable[Any]:
    """`micro_batches`, loaded with the same random numbers on all ranks that share a data shard.

    Returns `micro_batches` itself if every rank has its own shard. `skipped` micro-batches of this
    rank came before these.
    """
    if adapter.data_parallel_size == distributed.get_size():
        return micro_batches
    return _SharedRngLoader(
        micro_batches,
        seed,
        first=skipped * adapter.data_parallel_size + adapter.data_parallel_rank,
        stride=adapter.data_parallel_size,
    )


@dataclass
class _SharedRngLoader:
    source: Iterable[Any]
    seed: int
    first: int
    stride: int

    def __iter__(self) -> Iterator[Any]:
        return isolated(self._seeded())

    def _seeded(self) -> Iterator[Any]:
        source = iter(self.source)
        for position in itertools.count(self.first, self.stride):
            seed_globals(derive_seed(self.seed, "micro-batch", 0, position))
            try:
                micro_batch = next(source)
            except StopIteration:
                return
            yield micro_batch
