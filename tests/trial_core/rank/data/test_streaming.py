"""Streams of Hugging Face's `datasets` continue exactly, on any number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from trial_core.pytorch import DataLoader

if TYPE_CHECKING:
    import datasets  # by each test: it takes two seconds


def rows(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        for row in range(10):
            yield {"x": 10 * shard + row}


def stream() -> datasets.IterableDataset:
    """40 rows in 4 shards, shuffled in a buffer and changed."""
    import datasets

    plain = datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": [0, 1, 2, 3]})
    return plain.shuffle(seed=3, buffer_size=8).map(lambda row: {"y": 2 * row["x"]})


def taken(skip: int, ranks: int, rank: int, count: int, workers: int = 0) -> list[list[int]]:
    loader = DataLoader(stream(), batch_size=4, num_workers=workers)
    batches = iter(loader.get_data_loader(repeat=True, skip=skip, num_replicas=ranks, rank=rank))
    return [batch["y"].tolist() for batch in itertools.islice(batches, count)]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_stream_continues_with_the_next_batch(workers: int) -> None:
    """In a later epoch too, which has another order; and on two ranks after one."""
    whole = taken(0, 1, 0, 16)
    assert sorted(itertools.chain(*whole[:10])) == [2 * x for x in range(40)]
    assert whole[10:16] != whole[:6]
    assert taken(7, 1, 0, 9, workers) == whole[7:]
    first, second = (taken(4, 2, rank, 4, workers) for rank in (0, 1))
    assert [batch for pair in zip(first, second, strict=True) for batch in pair] == whole[8:16]


def test_a_stateful_loader_continues_a_stream() -> None:
    """Without reading what was read before, as long as nothing is buffered."""
    import datasets

    def loader() -> Any:
        plain = datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": [0, 1, 2, 3]})
        return StatefulDataLoader(plain.with_format("torch"), batch_size=4)

    whole = [batch["x"].tolist() for batch in loader()]
    first = loader()
    for _ in itertools.islice(first, 3):
        state = first.state_dict()
    again = loader()
    again.load_state_dict(state)
    assert [batch["x"].tolist() for batch in again] == whole[3:]
