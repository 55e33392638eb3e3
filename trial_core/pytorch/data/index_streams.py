"""What lies below the samplers: passes that can be entered anywhere.

A *pass* is one epoch's items in order: indices of samples, or batches of indices. Every sampler
here gives any part of any pass: `iterate(epoch, start, step)`. Sharding and skipping are then
arithmetic on `start` and `step`, and cost nothing, however far they reach.

`as_index_stream` turns whatever a user gives a loader into such a sampler. How directly a pass can be
entered depends on what it was (`Access`); in no case is the dataset touched.
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

from trial_core.pytorch.seeding import derive_seed, generator_for, isolated, seed_globals

T = TypeVar("T")

# A pass for random access; arrays where a list of ints would take five times the memory.
Order = Sequence[Any] | np.ndarray[Any, Any]

logger = logging.getLogger(__name__)

# Micro-batches' worth that a user's own sampler is asked for at a time, since switching to its
# generators and back is not free. Loader workers look ahead about as far.
_LOOK_AHEAD = 32

_RANDOM_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class Access(IntEnum):
    """How directly a sampler's passes can be entered; a chain is as direct as its weakest link."""

    IN_ORDER = 0
    """Only by going through all passes before it: its order may depend on them."""
    BY_EPOCH = 1
    """Any pass, whose length is known once its epoch is set; within a pass, from its beginning."""
    DIRECT = 2
    """Anywhere at once: passes are equally long and pure functions of the epoch."""


class IndexStream(Sampler[T], Generic[T]):
    """A sampler of which any part of any pass can be had.

    Attributes:
        epoch: the pass that ``iter()`` gives. It does not advance by itself.
        access: how directly passes can be entered.
        endless: whether a pass goes on into the next epoch, for ever.
    """

    epoch = 0
    access = Access.DIRECT
    endless = False

    def set_epoch(self, epoch: int) -> None:
        """Choose the pass that ``iter()`` gives."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[T]:
        return self.iterate(self.epoch)

    def __len__(self) -> int:
        return self.length()

    def iterate(self, epoch: int, start: int = 0, step: int = 1) -> Iterator[T]:
        """The items at `start`, `start` + `step`, ... of pass `epoch`."""
        raise NotImplementedError

    def length(self, epoch: int | None = None) -> int:
        """Items in pass `epoch`; None: in a pass, as far as can be told without choosing one.

        Raises:
            TypeError: the sampler that this is made of has no length.
        """
        raise NotImplementedError

    def order(self, epoch: int) -> Order:
        """All items of pass `epoch`, for random access. Only where passes end."""
        return list(self.iterate(epoch))


class Wrapper(IndexStream[T], Generic[T]):
    """A sampler made of another one; as direct and as endless as that one."""

    def __init__(self, base: Iterable[T]) -> None:
        self.base: IndexStream[T] = as_index_stream(base)
        self.access = self.base.access
        self.endless = self.base.endless


class Fixed(IndexStream[T], Generic[T]):
    """The same items in the same order in every pass."""

    def __init__(self, items: Sequence[T]) -> None:
        self._items = items

    def iterate(self, epoch: int, start: int = 0, step: int = 1) -> Iterator[T]:
        return (self._items[i] for i in range(start, len(self._items), step))

    def length(self, epoch: int | None = None) -> int:
        return len(self._items)

    def order(self, epoch: int) -> Order:
        return self._items


class Shuffled(Wrapper[T], Generic[T]):
    """The items of another sampler, in an order that depends on the seed and the epoch alone."""

    def __init__(self, base: Iterable[T], seed: int) -> None:
        super().__init__(base)
        if self.endless:
            raise ValueError("cannot shuffle a sampler without end: shuffle before repeating")
        self._seed = seed

    def iterate(self, epoch: int, start: int = 0, step: int = 1) -> Iterator[T]:
        return iter(as_list(self.order(epoch)[start::step]))

    def length(self, epoch: int | None = None) -> int:
        return self.base.length(epoch)

    def order(self, epoch: int) -> Order:
        items = self.base.order(epoch)
        generator = generator_for(self._seed, "shuffle", epoch)
        places: np.ndarray[Any, Any] = torch.randperm(len(items), generator=generator).numpy()
        if isinstance(items, range) and items == range(len(items)):
            return places
        if isinstance(items, np.ndarray):
            shuffled: np.ndarray[Any, Any] = items[places]
            return shuffled
        return [items[i] for i in places]


class Reseeded(IndexStream[int]):
    """One of torch's random samplers, drawing from a generator of its own in every pass."""

    def __init__(self, sampler: Any, seed: int) -> None:
        self._sampler = sampler
        self._seed = seed

    def iterate(self, epoch: int, start: int = 0, step: int = 1) -> Iterator[int]:
        # A copy made now: the user's object stays as it is, and weights set since then count.
        sampler = copy.copy(self._sampler)
        sampler.generator = generator_for(self._seed, "sampler", epoch)
        return itertools.islice(sampler, start, None, step)

    def length(self, epoch: int | None = None) -> int:
        return len(self._sampler)


class Foreign(IndexStream[T], Generic[T]):
    """A sampler of the user's own.

    If it has ``set_epoch`` and a length, passes are entered directly. Otherwise all passes are
    gone through in order, so that one that remembers anything remembers it on resuming too. What
    it draws from the global generators comes from a state of its own, seeded for every pass.

    Args:
        look_ahead: how many items to ask it for at a time.
    """

    def __init__(self, sampler: Iterable[T], seed: int, look_ahead: int = _LOOK_AHEAD) -> None:
        self._sampler: Any = sampler
        self._seed = seed
        self._look_ahead = look_ahead
        if hasattr(sampler, "set_epoch") and length_of(sampler) is not None:
            self.access = Access.BY_EPOCH
        else:
            self.access = Access.IN_ORDER

    def iterate(self, epoch: int, start: int = 0, step: int = 1) -> Iterator[T]:
        return itertools.islice(isolated(self._pass(epoch), self._look_ahead), start, None, step)

    def length(self, epoch: int | None = None) -> int:
        if epoch is not None and hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        return len(self._sampler)

    def _pass(self, epoch: int) -> Iterator[T]:
        seed_globals(derive_seed(self._seed, "sampler", epoch))
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        promised = len(self._sampler) if self.access == Access.BY_EPOCH else None
        given = 0
        for item in self._sampler:
            given += 1
            yield item
        if promised is not None and given != promised:
            logger.warning(
                "%s has a length of %d in epoch %d but gave %d items: a run that resumes after "
                "this epoch will not go on exactly where it stopped; correct its __len__",
                type(self._sampler).__qualname__,
                promised,
                epoch,
                given,
            )


class Batches(Wrapper[Any]):
    """Batches of another sampler's items, as torch's BatchSampler makes them."""

    def __init__(self, sampler: Iterable[Any], batch_size: int, drop_last: bool) -> None:
        super().__init__(sampler)
        self._size = batch_size
        self._drop_last = drop_last

    def iterate(self, epoch: int, start: int = 0, step: int = 1) -> Iterator[list[Any]]:
        if self.access == Access.DIRECT and not self.endless:
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


def as_index_stream(sampler: Iterable[Any], seed: int = 0, per_batch: int = 1) -> IndexStream[Any]:
    """`sampler` as passes; `seed` is for samplers that draw from torch's global generator.

    A torch sampler's own generator gives the seed instead, by its ``initial_seed()``.

    Args:
        per_batch: how many of its items make a micro-batch.
    """
    if isinstance(sampler, IndexStream):
        return sampler
    kind = type(sampler)
    if isinstance(sampler, BatchSampler) and kind is BatchSampler:
        size = sampler.batch_size
        return Batches(as_index_stream(sampler.sampler, seed, size), size, sampler.drop_last)
    if isinstance(sampler, SequentialSampler) and kind is SequentialSampler:
        return Fixed(range(len(sampler)))
    if isinstance(sampler, _RANDOM_SAMPLERS) and kind in _RANDOM_SAMPLERS:
        if sampler.generator is not None:
            seed = sampler.generator.initial_seed()
        if isinstance(sampler, RandomSampler) and _is_permutation(sampler):
            return Shuffled(Fixed(range(len(sampler))), seed)
        return Reseeded(sampler, seed)
    if isinstance(sampler, (range, list, tuple)):
        return Fixed(sampler)
    return Foreign(sampler, seed, _LOOK_AHEAD * per_batch)


def _is_permutation(sampler: RandomSampler) -> bool:
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)


def as_list(part: Order) -> list[Any]:
    """A part of an order as a list of Python objects."""
    if isinstance(part, np.ndarray):
        items: list[Any] = part.tolist()
        return items
    return list(part)


def length_of(thing: Any) -> int | None:
    """``len(thing)``, or None if it has none."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None
