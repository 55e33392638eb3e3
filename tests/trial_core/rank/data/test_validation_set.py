"""How ranks agree on which validation batches count, for shards of any size."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st
from torch.utils.data import TensorDataset

from tests.support.toy.toy_trial import samples
from trial_core.errors import TrialError
from trial_core.pytorch import DataLoader
from trial_core.rank.data.validation_set import (
    PeekableIterator,
    ValidationSet,
    validation_set,
)


class Ranks:
    """A DistributedContext of ranks with shards of known sizes."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def allgather(self, mine: Any) -> list[Any]:
        *_, loader, unusable = mine
        return [(True, size, rank, loader, unusable) for rank, size in enumerate(self.sizes)]

    def get_rank(self) -> int:
        return 0

    def get_size(self) -> int:
        return len(self.sizes)


def one_rank(
    dataset: TensorDataset, rank: int, sizes: list[int], group: int, lockstep: bool, pads: bool
) -> tuple[ValidationSet, list[bool]]:
    adapter: Any = SimpleNamespace(
        data_parallel_rank=rank,
        data_parallel_size=len(sizes),
        micro_batches_per_evaluation=group,
        evaluates_in_lockstep=lockstep,
        pads_evaluation=pads,
        takes_smaller_micro_batches=pads,
    )
    ranks: Any = Ranks(sizes)
    validation = validation_set(adapter, DataLoader(dataset, batch_size=2), 0, ranks)
    return validation, list(validation.evaluations(validation.begin(), ranks))


sizes_of = st.tuples(st.integers(1, 30), st.integers(1, 5)).map(
    lambda drawn: [len(range(rank, drawn[0], drawn[1])) for rank in range(drawn[1])]
)


@given(sizes_of)
def test_padded_ranks_end_together(sizes: list[int]) -> None:
    """Every rank evaluates equally often; its own shard comes first, and all of it counts."""
    dataset = samples(2 * sum(sizes))
    for rank, own in enumerate(sizes):
        _, calls = one_rank(dataset, rank, sizes, group=1, lockstep=True, pads=True)
        assert calls == [True] * own + [False] * (max(sizes) - own)


@given(sizes_of, st.integers(1, 4))
def test_groups_end_with_the_shortest_shard(sizes: list[int], group: int) -> None:
    """All ranks evaluate the same number of whole groups, or all raise the same error."""
    dataset = samples(2 * sum(sizes))
    for rank in range(len(sizes)):
        if min(sizes) < group:
            with pytest.raises(TrialError, match=f"has {min(sizes)} on some rank"):
                one_rank(dataset, rank, sizes, group, lockstep=True, pads=False)
        else:
            _, calls = one_rank(dataset, rank, sizes, group, lockstep=True, pads=False)
            assert calls == [True] * (min(sizes) // group)


def test_left_out_micro_batches_are_told() -> None:
    """7 and 6 micro-batches in groups of 4: 3 of 7 are left out."""
    validation, _ = one_rank(samples(26), 0, [7, 6], group=4, lockstep=True, pads=False)
    assert "up to 3 of 7 micro-batches of a data-parallel rank are left out" in validation.warning
    whole, _ = one_rank(samples(24), 0, [6, 6], group=3, lockstep=True, pads=False)
    assert whole.warning == ""


@pytest.mark.parametrize(("count", "sizes"), [(7, [4]), (15, [4, 4])])
def test_a_pipeline_takes_no_smaller_micro_batch(count: int, sizes: list[int]) -> None:
    """Its stages agree on one shape. One that is left out harms nothing."""
    with pytest.raises(TrialError, match=rf"{count} samples .* of 2, .* last one has 1.*drop_last"):
        one_rank(samples(count), 0, sizes, group=2, lockstep=True, pads=False)
    one_rank(samples(count), 0, sizes, group=3, lockstep=True, pads=False)
    one_rank(samples(count + 1), 0, sizes, group=2, lockstep=True, pads=False)


def test_a_limit_ends_every_rank_alike() -> None:
    """Whatever the size of its shard."""
    for rank in (0, 1):
        validation, _ = one_rank(samples(14), rank, [4, 3], group=1, lockstep=True, pads=True)
        validation.limit = 2
        ranks: Any = Ranks([4, 3])
        assert list(validation.evaluations(validation.begin(), ranks)) == [True, True]


def test_micro_batches_are_loaded_as_late_as_possible() -> None:
    """When they are taken, or checked for."""
    source = itertools.count()
    batches = PeekableIterator(source)
    assert batches.has(2)
    assert next(source) == 2
    assert [next(batches), next(batches), next(batches)] == [0, 1, 3]


def test_padding_does_not_count_as_more_data() -> None:
    """It repeats one micro-batch without end."""
    batches = PeekableIterator(iter([1, 2, 3]))
    batches.repeat_forever(7)
    assert not batches.has(1)
    assert [next(batches), next(batches)] == [7, 7]


def test_a_rank_without_data_counts_what_the_rank_with_its_shard_counts() -> None:
    """Shards of 4 and 3 in lockstep: the padding of the shorter shard counts on neither rank."""
    adapter: Any = SimpleNamespace(
        data_parallel_rank=1, data_parallel_size=2, micro_batches_per_evaluation=1,
        evaluates_in_lockstep=True, pads_evaluation=True,
    )  # fmt: skip
    ranks: Any = Ranks([4, 3])
    validation = validation_set(adapter, None, 0, ranks)
    assert list(validation.evaluations(validation.begin(), ranks)) == [True, True, True, False]
