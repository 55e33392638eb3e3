"""The samplers: every sample once an epoch, and a resumed run equals the uninterrupted run."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import (
    BatchSampler,
    DistributedSampler as TorchDistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from trial_core.errors import TrialError
from trial_core.rank.data import samplers
from trial_core.rank.data.samplers import adapt_batch_sampler

SEED = 11


class GlobalShuffle:
    """A user's sampler without set_epoch that draws from all three global generators."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.length).tolist()
        random.shuffle(order)
        yield from np.random.permutation(order).tolist()


class Growing:
    """A user's sampler with a memory and without a length: each epoch has one more item."""

    def __init__(self, length: int) -> None:
        self.length = length - 1

    def __iter__(self) -> Iterator[int]:
        self.length += 1
        return iter(range(self.length))


class WithEpochs:
    """A user's sampler with set_epoch; epochs differ in length."""

    def __init__(self, length: int) -> None:
        self.base = length
        self.epoch = 0
        self.epochs_begun = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.base + self.epoch % 2

    def __iter__(self) -> Iterator[int]:
        self.epochs_begun += 1
        return iter([(i + self.epoch) % len(self) for i in range(len(self))])


def sequential(n: int) -> Any:
    return SequentialSampler(range(n))


def shuffled(n: int) -> Any:
    return RandomSampler(range(n))


def shuffled_by_name(n: int) -> Any:
    return samplers.ReproducibleShuffleSampler(range(n), seed=3)


def subset(n: int) -> Any:
    return SubsetRandomSampler(range(n))


MAKERS = [sequential, shuffled, shuffled_by_name, subset, GlobalShuffle, Growing, WithEpochs]
SAME_LENGTH_MAKERS = [sequential, shuffled, shuffled_by_name, subset, GlobalShuffle]

makers = st.sampled_from(MAKERS)
lengths = st.integers(1, 23)
batch_sizes = st.integers(1, 5)
worlds = st.integers(1, 5)


def take(chain: Any, count: int) -> list[Any]:
    return list(itertools.islice(iter(chain), count))


def rank_batches(
    base: Any, count: int, *, skip: int = 0, world: int = 1, rank: int = 0, seed: int = SEED
) -> list[list[int]]:
    return take(adapt_batch_sampler(base, True, skip, world, rank, seed=seed), count)


@settings(deadline=None)
@given(st.sampled_from(SAME_LENGTH_MAKERS), lengths, batch_sizes, worlds)
def test_every_sample_once_an_epoch(maker: Any, length: int, size: int, world: int) -> None:
    """All ranks together see each sample exactly once in each of three epochs.

    The ranks in turn give the unsharded sequence, of which an epoch is a slice.
    """
    per_epoch = -(-length // size)
    needed = -(-3 * per_epoch // world)
    ranks = [
        rank_batches(BatchSampler(maker(length), size, False), needed, world=world, rank=rank)
        for rank in range(world)
    ]
    turns = [batch for turn in zip(*ranks, strict=True) for batch in turn]
    for epoch in range(3):
        batches = turns[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(itertools.chain.from_iterable(batches)) == list(range(length))


@settings(deadline=None)
@given(makers, lengths, batch_sizes, st.booleans(), worlds, st.integers(0, 60), st.data())
def test_a_resumed_run_equals_the_uninterrupted_run(
    maker: Any, length: int, size: int, drop_last: bool, world: int, skip: int, data: Any
) -> None:
    """Skipping any number of micro-batches gives the rest of the uninterrupted run."""
    rank = data.draw(st.integers(0, world - 1))
    length = max(length, size)

    def fresh() -> BatchSampler:
        return BatchSampler(maker(length), size, drop_last)

    whole = rank_batches(fresh(), skip + 9, world=world, rank=rank)
    rest = rank_batches(fresh(), 9, skip=skip, world=world, rank=rank)
    assert rest == whole[skip:]


@settings(deadline=None)
@given(makers, lengths, worlds, st.integers(0, 40), st.data())
def test_a_resumed_run_equals_the_uninterrupted_run_without_batches(
    maker: Any, length: int, world: int, skip: int, data: Any
) -> None:
    """The same holds for single indices, and for samplers that are chained by hand."""
    rank = data.draw(st.integers(0, world - 1))

    def chain(skip: int) -> Any:
        repeated = samplers.RepeatSampler(maker(length))
        return samplers.SkipSampler(samplers.DistributedSampler(repeated, world, rank), skip)

    assert take(chain(skip), 9) == take(chain(0), skip + 9)[skip:]


@settings(deadline=None)
@given(makers, lengths, batch_sizes, st.booleans(), worlds)
def test_one_epoch_equals_the_unsharded_epoch(
    maker: Any, length: int, size: int, drop_last: bool, world: int
) -> None:
    """Without repeating, the ranks in turn give all batches of the epoch."""

    def batches(world: int, rank: int) -> list[list[int]]:
        base = BatchSampler(maker(length), size, drop_last)
        return list(adapt_batch_sampler(base, num_replicas=world, rank=rank, seed=SEED))

    ranks = [batches(world, rank) for rank in range(world)]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*ranks))
    assert [batch for batch in turns if batch is not None] == batches(1, 0)


@settings(deadline=None)
@given(lengths, batch_sizes, st.booleans(), worlds, st.integers(0, 9), st.data())
def test_length_is_the_number_of_batches_of_the_rank(
    length: int, size: int, drop_last: bool, world: int, skip: int, data: Any
) -> None:
    """Exactly, for every rank."""
    rank = data.draw(st.integers(0, world - 1))
    base = BatchSampler(sequential(length), size, drop_last)
    chain = adapt_batch_sampler(base, False, skip, world, rank)
    assert len(chain) == len(list(chain))


@pytest.mark.parametrize("maker", [sequential, shuffled, shuffled_by_name, subset])
def test_skipping_is_arithmetic(maker: Any) -> None:
    """Skipping 10**15 micro-batches is immediate, and reaches the right epoch."""
    far = 10**15
    per_epoch = 4
    chain = adapt_batch_sampler(BatchSampler(maker(10), 3, False), repeat=True, skip=far, seed=SEED)
    alone = adapt_batch_sampler(BatchSampler(maker(10), 3, False), seed=SEED)
    alone.set_epoch(far // per_epoch)
    assert take(chain, per_epoch) == list(alone)


def test_samplers_with_epochs_are_entered_directly() -> None:
    """With set_epoch and a length, earlier epochs are not read."""
    sampler = WithEpochs(5)
    # Epochs of 5 and 6 samples in turn; epoch 200 begins with sample 200 % 5.
    assert take(adapt_batch_sampler(sampler, True, skip=11 * 100), 2) == [0, 1]
    assert take(adapt_batch_sampler(sampler, True, skip=11 * 100 + 5), 2) == [3, 4]
    assert sampler.epochs_begun == 2


def test_a_wrong_length_causes_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Resuming relies on the length of an epoch."""

    class Boasting(WithEpochs):
        def __iter__(self) -> Iterator[int]:
            return iter([0])

    rank_batches(Boasting(5), 3)
    assert "Boasting has a length of 5 in epoch 0 but gave 1 items" in caplog.text


@pytest.mark.parametrize("maker", [shuffled, shuffled_by_name, subset, GlobalShuffle])
def test_epochs_differ(maker: Any) -> None:
    """Each epoch has another order."""
    flat = list(itertools.chain(*rank_batches(BatchSampler(maker(30), 10, False), 12)))
    assert len({tuple(flat[start : start + 30]) for start in range(0, 120, 30)}) == 4


@pytest.mark.parametrize("maker", [shuffled, subset, GlobalShuffle])
def test_the_order_depends_on_the_seed(maker: Any) -> None:
    """Another seed gives another order."""
    one, two = (rank_batches(BatchSampler(maker(30), 10, False), 3, seed=s) for s in (1, 2))
    assert one != two


@pytest.mark.parametrize("maker", MAKERS)
def test_global_generators_are_neither_used_nor_advanced(maker: Any) -> None:
    """Python's, numpy's and torch's."""

    def draw(seed: int) -> tuple[Any, Any]:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        order = rank_batches(BatchSampler(maker(9), 2, False), 20, skip=5)
        return order, (random.random(), np.random.rand(), torch.rand(1).item())

    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    untouched = (random.random(), np.random.rand(), torch.rand(1).item())
    order_1, drawn_1 = draw(1)
    order_2, _ = draw(2)
    assert order_1 == order_2
    assert drawn_1 == untouched


def test_a_samplers_own_generator_gives_the_seed() -> None:
    """The generator itself is not advanced."""

    def order(generator_seed: int, seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(generator_seed)
        before = generator.get_state()
        sampler = WeightedRandomSampler([1.0] * 20, 20, generator=generator)
        batches = rank_batches(BatchSampler(sampler, 4, False), 7, seed=seed)
        assert torch.equal(generator.get_state(), before)
        return batches

    assert order(5, seed=1) == order(5, seed=2)
    assert order(5, seed=1) != order(6, seed=1)


def test_each_iteration_is_the_next_epoch() -> None:
    """Of a sampler alone and of one below another; set_epoch chooses one."""
    sampler = samplers.ReproducibleShuffleSampler(range(20), seed=1)
    first, second, third = (list(sampler) for _ in range(3))
    assert sorted(first) == sorted(second) == list(range(20))
    assert len({tuple(first), tuple(second), tuple(third)}) == 3
    sampler.set_epoch(1)
    assert [list(sampler), list(sampler)] == [second, third]
    shard = samplers.DistributedSampler(sampler, num_workers=2, rank=1)
    batches = BatchSampler(samplers.ReproducibleShuffleSampler(range(20), seed=1), 20, False)
    assert [list(shard), list(shard)] == [first[1::2], second[1::2]]
    assert [*batches, *batches] == [first, second]
    repeated = samplers.RepeatSampler(samplers.ReproducibleShuffleSampler(range(20), seed=1))
    assert take(repeated, 60) == first + second + third


def test_lengths_are_those_of_the_reference() -> None:
    """A repeated or skipped sampler is as long as an epoch, and shards differ by one at most."""
    shuffled = samplers.ReproducibleShuffleSampler(range(7), seed=1)
    assert len(samplers.RepeatSampler(shuffled)) == len(samplers.SkipSampler(shuffled, 3)) == 7
    assert [len(samplers.DistributedSampler(shuffled, 3, rank)) for rank in range(3)] == [3, 2, 2]
    batches = BatchSampler(range(7), 2, False)
    shuffled_batches = samplers.ReproducibleShuffleBatchSampler(batches, seed=1)
    assert len(samplers.SkipBatchSampler(shuffled_batches, 9)) == 4
    assert len(samplers.RepeatBatchSampler(shuffled_batches)) == 4
    assert len(samplers.DistributedBatchSampler(shuffled_batches, 3, 1)) == 1
    # What is repeated has the items that are left.
    assert take(samplers.RepeatSampler(samplers.SkipSampler(range(5), 3)), 4) == [3, 4, 3, 4]


def test_any_items_can_be_shuffled() -> None:
    """Shuffling keeps the items, also if they are shuffled already."""
    for items in (range(5, 25), [7, 3, 7]):
        once = samplers.ReproducibleShuffleSampler(items, seed=1)
        twice = samplers.ReproducibleShuffleSampler(once, seed=2)
        assert sorted(once) == sorted(twice) == sorted(items)


def test_shuffled_batches_keep_their_contents() -> None:
    """Shuffling batches changes only their order."""
    base = BatchSampler(sequential(12), 3, False)
    chain = samplers.ReproducibleShuffleBatchSampler(base, seed=2)
    assert list(chain) != list(base)
    assert sorted(chain) == list(base)
    repeated = samplers.RepeatBatchSampler(samplers.ReproducibleShuffleBatchSampler(chain, seed=2))
    sharded = samplers.DistributedBatchSampler(repeated, num_workers=2, rank=1)
    assert take(samplers.SkipBatchSampler(sharded, skip=7), 3) == take(sharded, 10)[7:]


@pytest.mark.parametrize("base", [[], Growing(1)], ids=["known", "unknown"])
def test_repeating_nothing_is_refused(base: Any) -> None:
    """An empty epoch raises instead of looping forever."""
    if isinstance(base, Growing):
        base.length = -1
    with pytest.raises(TrialError, match="no items in epoch 0"):
        take(samplers.RepeatSampler(base), 1)


def test_shuffling_without_end_is_refused() -> None:
    """Repeating before shuffling would never end."""
    with pytest.raises(ValueError, match="shuffle before repeating"):
        samplers.ReproducibleShuffleSampler(samplers.RepeatSampler([1]), seed=0)


@pytest.mark.parametrize(("workers", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_impossible_shards_are_refused(workers: int, rank: int) -> None:
    """The error names rank and num_workers."""
    with pytest.raises(ValueError, match=f"rank={rank} and num_workers={workers}"):
        samplers.DistributedSampler([1], num_workers=workers, rank=rank)


def test_negative_skip_is_refused() -> None:
    """The error names the number."""
    with pytest.raises(ValueError, match="got -1"):
        samplers.SkipSampler([1], skip=-1)


def test_sharding_twice_is_refused() -> None:
    """torch's DistributedSampler inside the chain would lose data."""
    dataset: Any = range(8)
    sharding: Any = TorchDistributedSampler(dataset, num_replicas=2, rank=0)
    with pytest.raises(TrialError, match="shards the data itself"):
        adapt_batch_sampler(BatchSampler(sharding, 2, False), num_replicas=2, rank=0)
