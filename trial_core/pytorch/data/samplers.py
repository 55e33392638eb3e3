"""The chain of a reproducible loader: shuffle -> batch -> repeat -> shard -> skip.

Follows ``determined.pytorch.samplers``: same names, same arguments. What is different, because a
resumed run must be the uninterrupted run:

* A shuffle is a pure function of (seed, epoch). ``iter(sampler)`` gives the pass of
  ``sampler.epoch``, which ``set_epoch`` changes; the repeating samplers go through the epochs.
* Sharding neither pads nor drops, and says so: ``len()`` is what this very rank gets. Sharded
  after repeating, ranks take turns over the endless sequence, so that each epoch's items are
  seen exactly once by all ranks together, whether or not their number can be divided evenly.
* Skipping is arithmetic. No skipped item is produced, let alone looked up in the dataset, except
  with samplers of the user's own: see `Access`.

None of them ever draws from torch's global generator. Wrapped samplers that would (torch's
RandomSampler and its kin) get generators of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from torch.utils.data import DistributedSampler as TorchDistributedSampler

from trial_core.errors import TrialError
from trial_core.pytorch.data.index_streams import (
    Access,
    IndexStream,
    Shuffled,
    Wrapper,
    as_index_stream,
)

T = TypeVar("T")

__all__ = [
    "DistributedBatchSampler",
    "DistributedSampler",
    "RepeatBatchSampler",
    "RepeatSampler",
    "ReproducibleShuffleBatchSampler",
    "ReproducibleShuffleSampler",
    "SkipBatchSampler",
    "SkipSampler",
    "adapt_batch_sampler",
]


class _Repeat(Wrapper[T], Generic[T]):
    """Goes on from each epoch into the next, for ever."""

    def __init__(self, base: Iterable[T]) -> None:
        super().__init__(base)
        self.endless = True

    def length(self, epoch: int | None = None) -> int:
        return self.base.length(epoch)

    def iterate(self, epoch: int, start: int = 0, step: int = 1) -> Iterator[T]:
        if self.base.endless:
            return self.base.iterate(epoch, start, step)
        if self.access == Access.DIRECT:
            return self._jump(epoch, start, step)
        if self.access == Access.BY_EPOCH:
            epoch, start = self._locate(epoch, start)
        return itertools.islice(self._go_through(epoch), start, None, step)

    def _jump(self, epoch: int, start: int, step: int) -> Iterator[T]:
        length = self.base.length()
        if length == 0:
            raise _nothing_to_repeat(epoch)
        while True:
            epoch, start = epoch + start // length, start % length
            yield from self.base.iterate(epoch, start, step)
            start += len(range(start, length, step)) * step

    def _locate(self, epoch: int, start: int) -> tuple[int, int]:
        """The epoch in which item `start` lies, and its place there."""
        while start >= (length := self.base.length(epoch)):
            if length == 0:
                raise _nothing_to_repeat(epoch)
            start -= length
            epoch += 1
        return epoch, start

    def _go_through(self, epoch: int) -> Iterator[T]:
        for current in itertools.count(epoch):
            empty = True
            for item in self.base.iterate(current):
                empty = False
                yield item
            if empty:
                raise _nothing_to_repeat(current)


def _nothing_to_repeat(epoch: int) -> TrialError:
    return TrialError(
        f"the sampler has nothing in epoch {epoch}: the dataset has no samples, or fewer than one "
        "batch with drop_last=True"
    )


class _Shard(Wrapper[T], Generic[T]):
    """Every `num_workers`-th item, beginning with the `rank`-th."""

    def __init__(self, base: Iterable[T], num_workers: int, rank: int) -> None:
        if num_workers < 1 or not 0 <= rank < num_workers:
            raise ValueError(
                f"a shard is given by 0 <= rank < num_workers, got rank={rank} and "
                f"num_workers={num_workers}"
            )
        super().__init__(base)
        self.num_workers = num_workers
        self.rank = rank

    def length(self, epoch: int | None = None) -> int:
        return len(range(self.rank, self.base.length(epoch), self.num_workers))

    def iterate(self, epoch: int, start: int = 0, step: int = 1) -> Iterator[T]:
        workers = self.num_workers
        return self.base.iterate(epoch, self.rank + start * workers, step * workers)


class _Skip(Wrapper[T], Generic[T]):
    """Leaves out the first `skip` items."""

    def __init__(self, base: Iterable[T], skip: int) -> None:
        if skip < 0:
            raise ValueError(f"skip must not be negative, got {skip}")
        super().__init__(base)
        self.skip = skip

    def length(self, epoch: int | None = None) -> int:
        length = self.base.length(epoch)
        return length if self.endless else max(length - self.skip, 0)

    def iterate(self, epoch: int, start: int = 0, step: int = 1) -> Iterator[T]:
        return self.base.iterate(epoch, self.skip + start, step)


class RepeatSampler(_Repeat[int]):
    """A sampler's items, epoch after epoch without end; ``len()`` is one epoch's."""

    def __init__(self, sampler: Iterable[int]) -> None:
        super().__init__(sampler)


class RepeatBatchSampler(_Repeat[list[int]]):
    """A batch sampler's batches, epoch after epoch without end; ``len()`` is one epoch's."""

    def __init__(self, batch_sampler: Iterable[list[int]]) -> None:
        super().__init__(batch_sampler)


class DistributedSampler(_Shard[int]):
    """Every `num_workers`-th item of a sampler: those of the data-parallel rank `rank`."""

    def __init__(self, sampler: Iterable[int], num_workers: int, rank: int) -> None:
        super().__init__(sampler, num_workers, rank)


class DistributedBatchSampler(_Shard[list[int]]):
    """Every `num_workers`-th batch of a batch sampler: those of the data-parallel rank `rank`."""

    def __init__(self, batch_sampler: Iterable[list[int]], num_workers: int, rank: int) -> None:
        super().__init__(batch_sampler, num_workers, rank)


class SkipSampler(_Skip[int]):
    """A sampler without its first `skip` items.

    Repeat before you skip, or every epoch loses its beginning. Prefer `SkipBatchSampler` for
    resuming: what has been trained is counted in batches.
    """

    def __init__(self, sampler: Iterable[int], skip: int) -> None:
        super().__init__(sampler, skip)


class SkipBatchSampler(_Skip[list[int]]):
    """A batch sampler without its first `skip` batches.

    Repeat before you skip, or every epoch loses its beginning. With gradient accumulation, count
    in micro-batches.
    """

    def __init__(self, batch_sampler: Iterable[list[int]], skip: int) -> None:
        super().__init__(batch_sampler, skip)


class ReproducibleShuffleSampler(Shuffled[int]):
    """A sampler's items in an order that depends on the seed and the epoch alone.

    Shuffle before repeating, sharding and skipping. All ranks must use the same seed.
    """

    def __init__(self, sampler: Iterable[int], seed: int) -> None:
        super().__init__(sampler, seed)


class ReproducibleShuffleBatchSampler(Shuffled[list[int]]):
    """A batch sampler's batches in an order that depends on the seed and the epoch alone.

    The batches stay the same, only their order changes: prefer `ReproducibleShuffleSampler`.
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
) -> IndexStream[Any]:
    """One rank's part of a sampler or batch sampler: repeat -> shard -> skip.

    Args:
        repeat: go on from each epoch into the next, without end.
        skip: items of this rank that have been consumed already (micro-batches).
        num_replicas: data-parallel ranks.
        rank: this rank among them.
        seed: for a sampler that would draw from torch's global generator; the same on all ranks.

    Raises:
        TrialError: the sampler shards already.
    """
    if num_replicas > 1:
        _refuse_sharded(batch_sampler)
    chain = as_index_stream(batch_sampler, seed)
    if repeat:
        chain = _Repeat(chain)
    return _Skip(_Shard(chain, num_replicas, rank), skip)


def _refuse_sharded(sampler: Any) -> None:
    for layer in (sampler, getattr(sampler, "sampler", None)):
        if isinstance(layer, TorchDistributedSampler) and layer.num_replicas > 1:
            raise TrialError(
                "the loader's sampler is a torch.utils.data.DistributedSampler for "
                f"{layer.num_replicas} replicas, but trial_core.pytorch.DataLoader shards by "
                "itself: every rank would see a part of a part. Give it the unsharded sampler, or "
                "shuffle=True"
            )
