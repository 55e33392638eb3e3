"""The DataLoader with iterable datasets: every rank reads all samples and keeps its shard."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from torch.utils.data import IterableDataset, get_worker_info

from trial_core.errors import TrialError
from trial_core.pytorch import DataLoader


class Stream(IterableDataset[int]):
    """Counts up."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class ShufflesGlobally(Stream):
    """Order and noise are drawn from Python's global generator."""

    def __iter__(self) -> Iterator[Any]:
        order = list(range(self.length))
        random.shuffle(order)
        return ((index, random.random()) for index in order)


class DividesAmongWorkers(Stream):
    """Each loader worker yields a part, as torch's documentation advises."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, self.length, step))


class DividesEpochs(DividesAmongWorkers):
    """Also its length is that of a worker's part."""

    def set_epoch(self, epoch: int) -> None:
        pass

    def __len__(self) -> int:
        return sum(1 for _ in self)


class WithEpochs(Stream):
    """Has epochs and a length, so an epoch can be entered directly."""

    epoch = 0
    epochs_begun = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        self.epochs_begun += 1
        return iter([100 * self.epoch + i for i in range(self.length)])


def take(loader: Any, count: int) -> list[Any]:
    return list(itertools.islice(iter(loader), count))


def loader_of(dataset: Any, size: int = 2, **options: Any) -> DataLoader:
    return DataLoader(dataset, batch_size=size, collate_fn=list, **options)


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 4), st.booleans(), st.integers(1, 5))
def test_every_sample_once(length: int, size: int, drop_last: bool, world: int) -> None:
    """In one epoch, the ranks in turn give each unsharded micro-batch exactly once."""
    loader = loader_of(Stream(length), size, drop_last=drop_last)
    ranks = [list(loader.get_data_loader(num_replicas=world, rank=rank)) for rank in range(world)]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*ranks))
    whole = [list(range(i, min(i + size, length))) for i in range(0, length, size)]
    expected = [batch for batch in whole if not drop_last or len(batch) == size]
    assert [batch for batch in turns if batch is not None] == expected


@settings(deadline=None)
@given(
    st.integers(4, 15),
    st.integers(1, 4),
    st.booleans(),
    st.integers(1, 4),
    st.integers(0, 25),
    st.sampled_from([Stream, ShufflesGlobally, WithEpochs]),
    st.data(),
)
def test_a_resumed_run_equals_the_uninterrupted_run(
    length: int, size: int, drop_last: bool, world: int, skip: int, kind: Any, data: Any
) -> None:
    """Skipping any number of micro-batches gives the rest of the uninterrupted run."""
    rank = data.draw(st.integers(0, world - 1))

    def batches(skip: int, count: int) -> list[Any]:
        loader = loader_of(kind(length), size, drop_last=drop_last)
        return take(loader.get_data_loader(True, skip, world, rank, seed=2), count)

    assert batches(skip, 6) == batches(0, skip + 6)[skip:]


@pytest.mark.parametrize("kind", [Stream, ShufflesGlobally, DividesAmongWorkers, DividesEpochs])
def test_the_number_of_workers_changes_nothing(kind: Any) -> None:
    """The same micro-batches in the same order, also after skipping.

    Also if the dataset divides itself among workers, or shuffles with global generators.
    """

    def batches(workers: int) -> list[Any]:
        loader = loader_of(kind(11), num_workers=workers)
        return take(loader.get_data_loader(True, skip=4, num_replicas=2, rank=1), 10)

    assert batches(2) == batches(1) == batches(0)


def test_an_epoch_with_workers_is_complete() -> None:
    """Two ranks with two workers each see every sample once."""
    loader = loader_of(DividesAmongWorkers(21), num_workers=2)
    ranks = [list(loader.get_data_loader(num_replicas=2, rank=rank)) for rank in range(2)]
    assert sorted(itertools.chain(*itertools.chain(*ranks))) == list(range(21))


def test_epochs_are_entered_directly() -> None:
    """With set_epoch and a length, earlier epochs are not read."""
    dataset = WithEpochs(6)
    shard = loader_of(dataset).get_data_loader(True, skip=3 * 500 + 1)
    assert take(shard, 1) == [[50002, 50003]]
    assert dataset.epochs_begun == 1


def test_epochs_differ_by_seed_and_epoch() -> None:
    """Random numbers depend on seed and epoch only."""

    def epochs(seed: int) -> list[Any]:
        loader = loader_of(ShufflesGlobally(12), 12)
        return [str(batch) for batch in take(loader.get_data_loader(True, seed=seed), 2)]

    assert epochs(1) == epochs(1)
    assert len({*epochs(1), *epochs(2)}) == 4


def test_global_generators_are_left_alone() -> None:
    """A dataset that draws in the rank's process does not advance the rank's generators."""
    random.seed(1)
    expected = random.random()
    random.seed(1)
    take(loader_of(ShufflesGlobally(8)).get_data_loader(repeat=True), 7)
    assert random.random() == expected


def test_lengths() -> None:
    """Exact if the dataset has a length; an endless loader has none."""
    known, unknown = loader_of(WithEpochs(7)), loader_of(Stream(7))
    assert known.num_micro_batches == len(known) == 4
    assert len(known.get_data_loader(num_replicas=3, rank=1)) == 1
    assert unknown.num_micro_batches is None
    for loader in (unknown, known.get_data_loader(repeat=True), unknown.get_data_loader()):
        with pytest.raises(TypeError):
            len(loader)


def test_without_batching() -> None:
    """With batch_size=None each item of the dataset is a micro-batch."""
    loader = DataLoader(Stream(5), batch_size=None)
    assert take(loader.get_data_loader(True, 1, 2, 1), 4) == [3, 0, 2, 4]


class Approximate(WithEpochs):
    """Two samples of each epoch cannot be read."""

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(super().__iter__(), self.length - 2)


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_wrong_length_is_said_once(drop_last: bool, caplog: pytest.LogCaptureFixture) -> None:
    """On rank 0, when the epoch has ended: a resumed run enters other epochs by the length."""
    for rank in (1, 0):
        assert caplog.messages == []
        loader = loader_of(Approximate(9), drop_last=drop_last)
        take(loader.get_data_loader(True, num_replicas=2, rank=rank), 3)
    (message,) = caplog.messages
    assert message.startswith("Approximate has a length of 9 in epoch 0 but gave 7 items: ")
    assert "a run that resumes after this epoch may not continue exactly" in message


def test_a_right_length_causes_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Nor does a part of an epoch, nor an epoch that is not repeated: no run resumes there."""
    list(loader_of(Approximate(9)).get_data_loader())
    take(loader_of(WithEpochs(9)).get_data_loader(True), 12)
    take(loader_of(Approximate(9)).get_data_loader(True), 4)
    assert caplog.messages == []


class OfUnknownLength(IterableDataset[int]):
    """Without epochs to choose from, so that its length is not asked for."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __len__(self) -> int:
        raise RuntimeError("unknown")


def test_a_length_that_positions_do_not_depend_on_is_not_asked_for() -> None:
    """A dataset without `set_epoch` is read from its begin."""
    assert len(take(loader_of(OfUnknownLength()).get_data_loader(True), 4)) == 4


@pytest.mark.long
def test_one_loader_worker_warns_of_a_wrong_length(capfd: pytest.CaptureFixture[str]) -> None:
    """In its log, which is the rank's."""
    loader = loader_of(Approximate(9), num_workers=2, multiprocessing_context="spawn")
    take(loader.get_data_loader(True), 9)
    assert capfd.readouterr().err.count("Approximate has a length of 9 in epoch 0") == 1


class Once(IterableDataset[int]):
    """Gives its samples only once."""

    def __init__(self) -> None:
        self.samples = iter([1, 2, 3])

    def __iter__(self) -> Iterator[int]:
        return self.samples


def test_a_dataset_with_an_empty_second_epoch_is_refused() -> None:
    """The loader raises instead of looping forever."""
    batches = iter(loader_of(Once()).get_data_loader(repeat=True))
    assert [next(batches), next(batches)] == [[1, 2], [3]]
    with pytest.raises(TrialError, match="Once gave no sample in epoch 1"):
        next(batches)


@pytest.mark.parametrize(("skip", "rank"), [(-1, 0), (0, 2)])
def test_impossible_shards_are_refused(skip: int, rank: int) -> None:
    """The error names skip, rank and num_replicas."""
    with pytest.raises(ValueError, match=f"skip={skip}, rank={rank} and num_replicas=2"):
        loader_of(Stream(3)).get_data_loader(skip=skip, num_replicas=2, rank=rank)
