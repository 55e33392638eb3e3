"""Samplers whose epochs can be entered at any position.

`SeekableSampler.iterate(epoch, start, step)` gives any part of any epoch: indices of samples, or
batches of indices. Sharding and skipping are then arithmetic on `start` and `step`, and cost
nothing, however far they reach.

`as_seekable` makes such a sampler of any sampler that a loader is given. How directly its epochs
can be entered depends on the sampler (`Access`). The dataset is never touched.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from trial_core.rank.trial.seeding import derive_seed, generator_for, isolated, seed_globals

T = TypeVar("T")

# The items of an epoch. An array where a list of ints would take five times the memory.
EpochOrder = Sequence[Any] | np.ndarray[Any, Any]

logger = logging.getLogger(__name__)

# How many micro-batches a user's sampler is asked for at a time: each time its random generators
# are switched in and out. Loader workers prefetch about as many.
_PREFETCHED_MICRO_BATCHES = 32

_RANDOM_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class Access(IntEnum):
    """How directly epochs can be entered; a chain of samplers has the lowest of its members."""

    SEQUENTIAL = 0
    """Only through all earlier epochs: the order may depend on them."""
    BY_EPOCH = 1
    """Any epoch, but only from its beginning. Its length is known after `set_epoch`."""
    DIRECT = 2
    """Any position. All epochs have one length, and depend only on the epoch's number."""


class SeekableSampler(Sampler[T], Generic[T]):
    """A sampler of which any part of any epoch can be read.

    ``iter()`` gives `epoch`, and does not advance it. If `is_endless`, iteration continues into the
    next epoch, without end.
    """

    epoch = 0
    access = Access.DIRECT
    is_endless = False

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that ``iter()`` gives."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[T]:
        return self.iterate(self.epoch)

    def __len__(self) -> int:
        return self.length()

    def iterate(self, epoch: int, start: int = 0, step: int = 1) -> Iterator[T]:
        """The items at `start`, `start` + `step`, ... of an epoch."""
        raise NotImplementedError

    def length(self, epoch: int | None = None) -> int:
        """Number of items in an epoch, by default the underlying sampler's present one.

        Raises TypeError if the underlying sampler has no length.
        """
        raise NotImplementedError

    def order(self, epoch: int) -> EpochOrder:
        """All items of an epoch, for random access. Not for endless samplers."""
        return list(self.iterate(epoch))


class SamplerWrapper(SeekableSampler[T], Generic[T]):
    """A sampler on top of another one, whose `access` and `is_endless` it has."""

    def __init__(self, base: Iterable[T]) -> None:
        self.base: SeekableSampler[T] = as_seekable(base)
        self.access = self.base.access
        self.is_endless = self.base.is_endless

    def length(self, epoch: int | None = None) -> int:
        return self.base.length(epoch)


class FixedSampler(SeekableSampler[T], Generic[T]):
    """The same items in the same order in every epoch."""

    def __init__(self, items: Sequence[T]) -> None:
        self._items = items

    def iterate(self, epoch: int, start: int = 0, step: int = 1) -> Iterator[T]:
        return (self._items[i] for i in range(start, len(self._items), step))

    def length(self, epoch: int | None = None) -> int:
        return len(self._items)

    def order(self, epoch: int) -> EpochOrder:
        return self._items


class ShuffledSampler(SamplerWrapper[T], Generic[T]):
    """The items of another sampler, in an order that depends only on the seed and the epoch."""

    def __init__(self, sampler: Iterable[T], seed: int) -> None:
        super().__init__(sampler)
        if self.is_endless:
            raise ValueError("cannot shuffle an endless sampler: shuffle before repeating")
        self._seed = seed

    def iterate(self, epoch: int, start: int = 0, step: int = 1) -> Iterator[T]:
        return iter(as_list(self.order(epoch)[start::step]))

    def order(self, epoch: int) -> EpochOrder:
        items = self.base.order(epoch)
        generator = generator_for(self._seed, "shuffle", epoch)
        places: np.ndarray[Any, Any] = torch.randperm(len(items), generator=generator).numpy()
        if isinstance(items, range) and items == range(len(items)):
            return places
        if isinstance(items, np.ndarray):
            shuffled: np.ndarray[Any, Any] = items[places]
            return shuffled
        return [items[i] for i in places]


class ReseededSampler(SeekableSampler[int]):
    """One of torch's random samplers, with a generator that is reseeded for every epoch."""

    def __init__(self, sampler: Any, seed: int) -> None:
        self._sampler = sampler
        self._seed = seed

    def iterate(self, epoch: int, start: int = 0, step: int = 1) -> Iterator[int]:
        # Copied now, so that weights changed since then count; the user's sampler is not changed.
        sampler = copy.copy(self._sampler)
        sampler.generator = generator_for(self._seed, "sampler", epoch)
        return itertools.islice(sampler, start, None, step)

    def length(self, epoch: int | None = None) -> int:
        return len(self._sampler)


class UserSampler(SeekableSampler[T], Generic[T]):
    """A sampler that the user wrote.

    With ``set_epoch`` and a length, epochs are entered directly. Otherwise all epochs are read in
    order, so that a sampler with a memory has the same memory after resuming. Random numbers that
    it draws from the global generators come from a separate state, seeded for every epoch. It is
    asked for `prefetch` items at a time.
    """

    def __init__(self, sampler: Iterable[T], seed: int, prefetch: int) -> None:
        self._sampler: Any = sampler
        self._seed = seed
        self._prefetch = prefetch
        is_by_epoch = hasattr(sampler, "set_epoch") and length_of(sampler) is not None
        self.access = Access.BY_EPOCH if is_by_epoch else Access.SEQUENTIAL

    def iterate(self, epoch: int, start: int = 0, step: int = 1) -> Iterator[T]:
        return itertools.islice(isolated(self._items(epoch), self._prefetch), start, None, step)

    def length(self, epoch: int | None = None) -> int:
        if epoch is not None and hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        return len(self._sampler)

    def _items(self, epoch: int) -> Iterator[T]:
        seed_globals(derive_seed(self._seed, "sampler", epoch))
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        expected = len(self._sampler) if self.access == Access.BY_EPOCH else None
        count = 0
        for item in self._sampler:
            count += 1
            yield item
        warn_of_length(self._sampler, epoch, expected, count)


class SeekableBatchSampler(SamplerWrapper[Any]):
    """Batches of another sampler's items, as torch's BatchSampler makes them."""

    def __init__(self, sampler: Iterable[Any], batch_size: int, drop_last: bool) -> None:
        super().__init__(sampler)
        self._size = batch_size
        self._drop_last = drop_last

    def iterate(self, epoch: int, start: int = 0, step: int = 1) -> Iterator[list[Any]]:
        if self.access == Access.DIRECT and not self.is_endless:
            return self._slices(epoch, start, step)
        return self._stream(epoch, start, step)

    def length(self, epoch: int | None = None) -> int:
        return self._count(self.base.length(epoch))

    def _count(self, items: int) -> int:
        return items // self._size if self._drop_last else -(-items // self._size)

    def _slices(self, epoch: int, start: int, step: int) -> Iterator[list[Any]]:
        order = self.base.order(epoch)
        for i in range(start, self._count(len(order)), step):
            yield as_list(order[i * self._size : (i + 1) * self._size])

    def _stream(self, epoch: int, start: int, step: int) -> Iterator[list[Any]]:
        items = self.base.iterate(epoch, start * self._size)
        while batch := list(itertools.islice(items, self._size)):
            if self._drop_last and len(batch) < self._size:
                return
            yield batch
            deque(itertools.islice(items, (step - 1) * self._size), maxlen=0)


def as_seekable(
    sampler: Iterable[Any], seed: int = 0, items_per_micro_batch: int = 1
) -> SeekableSampler[Any]:
    """A seekable sampler with the items of `sampler`.

    `seed` is for samplers that would draw from torch's global generator. A torch sampler's own
    generator replaces it by its ``initial_seed()``.
    """
    if isinstance(sampler, SeekableSampler):
        return sampler
    kind = type(sampler)
    if isinstance(sampler, BatchSampler) and kind is BatchSampler:
        size = sampler.batch_size
        base = as_seekable(sampler.sampler, seed, size)
        return SeekableBatchSampler(base, size, sampler.drop_last)
    if isinstance(sampler, SequentialSampler) and kind is SequentialSampler:
        return FixedSampler(range(len(sampler)))
    if isinstance(sampler, _RANDOM_SAMPLERS) and kind in _RANDOM_SAMPLERS:
        if sampler.generator is not None:
            seed = sampler.generator.initial_seed()
        if (
            isinstance(sampler, RandomSampler)
            and not sampler.replacement
            and sampler.num_samples == len(sampler.data_source)
        ):
            return ShuffledSampler(FixedSampler(range(len(sampler))), seed)
        return ReseededSampler(sampler, seed)
    if isinstance(sampler, (range, list, tuple)):
        return FixedSampler(sampler)
    return UserSampler(sampler, seed, _PREFETCHED_MICRO_BATCHES * items_per_micro_batch)


def as_list(order: EpochOrder) -> list[Any]:
    if isinstance(order, np.ndarray):
        items: list[Any] = order.tolist()
        return items
    return list(order)


def length_of(sized: Any) -> int | None:
    """``len(sized)``, or None if it has none."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def warn_of_length(source: Any, epoch: int, expected: int | None, count: int) -> None:
    """Warn if an epoch of a sampler or dataset was not as long as `expected`, if anything was."""
    if expected is not None and count != expected:
        logger.warning(
            f"{type(source).__qualname__} has a length of {expected} in epoch {epoch} but gave "
            f"{count} items: epochs are counted by the length, and a run that resumes after this "
            "epoch may not continue exactly where it stopped; correct its __len__, or remove it"
        )
