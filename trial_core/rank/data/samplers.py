"""The samplers of a reproducible loader: shuffle -> batch -> repeat -> shard -> skip.

Follows ``determined.pytorch.samplers``: same names, same arguments. Three things differ, so that a
resumed run equals the uninterrupted run:

* A shuffle depends only on (seed, epoch). The first ``iter(sampler)`` gives epoch 0, or the one
  that ``set_epoch`` chose, and each further one the next epoch.
* Sharding neither pads nor drops: ``len()`` is the number of items of this rank. If samplers are
  repeated before they are sharded, ranks take turns over the endless sequence. All ranks together
  then see each item of an epoch exactly once, even if the ranks do not divide its length.
* Skipping is arithmetic. Skipped items are neither produced nor looked up in the dataset, except
  with some samplers that users write: see `Access`.

These samplers never draw from torch's global generator. Wrapped samplers that would (torch's
RandomSampler and similar) get a separate generator.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from torch.utils.data import DistributedSampler as TorchDistributedSampler

from trial_core.errors import TrialError, TrialValueError
from trial_core.rank.data.seekable_samplers import (
    Access,
    SamplerWrapper,
    SeekableSampler,
    ShuffledSampler,
    as_seekable,
)

T = TypeVar("T")


class _InTurn(SamplerWrapper[T], Generic[T]):
    """``iter()`` gives the next epoch each time. A run does not use it: it names the epoch."""

    def __iter__(self) -> Iterator[T]:
        self.epoch += 1
        return self.iterate(self.epoch - 1)


class _Repeat(SamplerWrapper[T], Generic[T]):
    """The base sampler's epochs, one after the other without end."""

    def __init__(self, sampler: Iterable[T]) -> None:
        super().__init__(sampler)
        self.is_endless = True

    def iterate(self, epoch: int, start: int = 0, step: int = 1) -> Iterator[T]:
        if self.base.is_endless:
            return self.base.iterate(epoch, start, step)
        if self.access == Access.DIRECT:
            return self._seek(epoch, start, step)
        if self.access == Access.BY_EPOCH:
            epoch, start = self._locate(epoch, start)
        return itertools.islice(self._read_in_order(epoch), start, None, step)

    def _seek(self, epoch: int, start: int, step: int) -> Iterator[T]:
        length = self.base.length()
        if length == 0:
            raise _empty_epoch(epoch)
        while True:
            epoch, start = epoch + start // length, start % length
            yield from self.base.iterate(epoch, start, step)
            start += len(range(start, length, step)) * step

    def _locate(self, epoch: int, start: int) -> tuple[int, int]:
        """The epoch that contains item `start`, and the position there."""
        while start >= (length := self.base.length(epoch)):
            if length == 0:
                raise _empty_epoch(epoch)
            start -= length
            epoch += 1
        return epoch, start

    def _read_in_order(self, epoch: int) -> Iterator[T]:
        for current in itertools.count(epoch):
            empty = True
            for item in self.base.iterate(current):
                empty = False
                yield item
            if empty:
                raise _empty_epoch(current)


def _empty_epoch(epoch: int) -> TrialError:
    return TrialError(
        f"the sampler has no items in epoch {epoch}: the dataset has no samples, or fewer than one "
        "batch with drop_last=True"
    )


class _Shard(SamplerWrapper[T], Generic[T]):
    """Every `num_workers`-th item, starting with item `rank`."""

    def __init__(self, sampler: Iterable[T], num_workers: int, rank: int) -> None:
        if num_workers < 1 or not 0 <= rank < num_workers:
            raise TrialValueError(
                "a shard needs 0 <= rank < num_workers, got "
                f"rank={rank} and num_workers={num_workers}"
            )
        super().__init__(sampler)
        self.num_workers = num_workers
        self.rank = rank

    def length(self, epoch: int | None = None) -> int:
        return len(range(self.rank, self.base.length(epoch), self.num_workers))

    def iterate(self, epoch: int, start: int = 0, step: int = 1) -> Iterator[T]:
        workers = self.num_workers
        return self.base.iterate(epoch, self.rank + start * workers, step * workers)


class _Skip(SamplerWrapper[T], Generic[T]):
    """The items after the first `skip`."""

    def __init__(self, sampler: Iterable[T], skip: int) -> None:
        if skip < 0:
            raise TrialValueError(f"skip must not be negative, got {skip}")
        super().__init__(sampler)
        self.skip = skip

    def length(self, epoch: int | None = None) -> int:
        length = self.base.length(epoch)
        return length if self.is_endless else max(length - self.skip, 0)

    def iterate(self, epoch: int, start: int = 0, step: int = 1) -> Iterator[T]:
        return self.base.iterate(epoch, self.skip + start, step)


class RepeatSampler(_InTurn[int], _Repeat[int]):
    """A sampler's items, epoch after epoch without end. ``len()`` is one epoch."""


class RepeatBatchSampler(_InTurn[list[int]], _Repeat[list[int]]):
    """A batch sampler's batches, epoch after epoch without end. ``len()`` is one epoch."""

    def __init__(self, batch_sampler: Iterable[list[int]]) -> None:
        super().__init__(batch_sampler)


class DistributedSampler(_InTurn[int], _Shard[int]):
    """Every `num_workers`-th item of a sampler: the shard of data-parallel rank `rank`."""


class DistributedBatchSampler(_InTurn[list[int]], _Shard[list[int]]):
    """Every `num_workers`-th batch of a batch sampler: the shard of data-parallel rank `rank`."""

    def __init__(self, batch_sampler: Iterable[list[int]], num_workers: int, rank: int) -> None:
        super().__init__(batch_sampler, num_workers, rank)


class SkipSampler(_InTurn[int], _Skip[int]):
    """A sampler without its first `skip` items. ``len()`` is the whole sampler's.

    Repeat before you skip; otherwise every epoch loses its beginning. Prefer `SkipBatchSampler` to
    resume: progress is counted in batches.
    """

    def __len__(self) -> int:
        return self.base.length()


class SkipBatchSampler(_InTurn[list[int]], _Skip[list[int]]):
    """A batch sampler without its first `skip` batches. ``len()`` is the whole sampler's.

    Repeat before you skip; otherwise every epoch loses its beginning. With gradient accumulation,
    `skip` counts micro-batches.
    """

    def __init__(self, batch_sampler: Iterable[list[int]], skip: int) -> None:
        super().__init__(batch_sampler, skip)

    def __len__(self) -> int:
        return self.base.length()


class ReproducibleShuffleSampler(_InTurn[int], ShuffledSampler[int]):
    """A sampler's items in an order that depends only on the seed and the epoch.

    Shuffle before repeating, sharding and skipping. All ranks must use the same seed.
    """


class ReproducibleShuffleBatchSampler(_InTurn[list[int]], ShuffledSampler[list[int]]):
    """A batch sampler's batches in an order that depends only on the seed and the epoch.

    The content of the batches stays the same: prefer `ReproducibleShuffleSampler`.
    """

    def __init__(self, batch_sampler: Iterable[list[int]], seed: int) -> None:
        super().__init__(batch_sampler, seed)


def adapt_batch_sampler(
    batch_sampler: Iterable[Any],
    repeat: bool = False,
    skip: int = 0,
    num_replicas: int = 1,
    rank: int = 0,
    *,
    seed: int = 0,
) -> SeekableSampler[Any]:
    """One rank's shard of a sampler or batch sampler: repeat -> shard -> skip.

    Args:
        repeat: repeat the epochs without end.
        skip: number of items (micro-batches) that this rank has consumed.
        num_replicas: number of data-parallel ranks.
        rank: index of this data-parallel rank.
        seed: for a sampler that would draw from torch's global generator; the same on all ranks.

    Raises:
        TrialError: the sampler is sharded already.
    """
    if num_replicas > 1:
        _refuse_sharded(batch_sampler)
    chain = as_seekable(batch_sampler, seed)
    if repeat:
        chain = _Repeat(chain)
    return _Skip(_Shard(chain, num_replicas, rank), skip)


def _refuse_sharded(sampler: Any) -> None:
    for layer in (sampler, getattr(sampler, "sampler", None)):
        if isinstance(layer, TorchDistributedSampler) and layer.num_replicas > 1:
            raise TrialError(
                "the loader's sampler is a torch.utils.data.DistributedSampler for "
                f"{layer.num_replicas} replicas, but trial_core.pytorch.DataLoader shards the data "
                "itself: every rank would see a shard of a shard. Give it the unsharded sampler, "
                "or shuffle=True"
            )
