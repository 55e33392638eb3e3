"""The DataLoader with map-style datasets, with and without worker processes."""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils import data

from trial_core.errors import TrialError
from trial_core.pytorch import DataLoader


class Augmented(data.Dataset[torch.Tensor]):
    """Samples with random numbers from each of the three global generators."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(1).item(), random.random(), np.random.rand()])


class Unread(data.Dataset[int]):
    """A dataset that must not be read."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        raise AssertionError(f"sample {index} was read")


class Numbers(data.Dataset[int]):
    """Each sample is its index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class NoLength(data.Dataset[int]):
    """A map-style dataset without a length."""

    def __getitem__(self, index: int) -> int:
        return index


class ByEpoch(Numbers):
    """Each sample is the epoch that the dataset was told last."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> int:
        return self.epoch


def take(loader: Any, count: int) -> list[Any]:
    return [batch.tolist() for batch in itertools.islice(iter(loader), count)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"shuffle": True}, marks=pytest.mark.long),
        {"shuffle": True, "drop_last": True},
    ],
)
def test_a_resumed_rank_continues_in_the_middle_of_an_epoch(
    workers: int, options: dict[str, Any]
) -> None:
    """It sees the micro-batches of the uninterrupted run, with workers or without."""
    loader = DataLoader(Numbers(17), batch_size=2, num_workers=workers, **options)

    def rest(skip: int) -> list[Any]:
        return take(loader.get_data_loader(True, skip, num_replicas=2, rank=1, seed=5), 20 - skip)

    assert rest(skip=7) == rest(skip=0)[7:]


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 6), st.booleans(), st.booleans(), st.integers(1, 5))
def test_every_sample_once(
    length: int, size: int, shuffle: bool, drop_last: bool, world: int
) -> None:
    """In one epoch, all ranks together see every sample once, and ``len()`` is exact."""
    loader = DataLoader(Numbers(length), batch_size=size, shuffle=shuffle, drop_last=drop_last)
    ranks = [loader.get_data_loader(num_replicas=world, rank=rank) for rank in range(world)]
    batches = [take(rank, 10**6) for rank in ranks]
    assert [len(rank) for rank in ranks] == [len(rank) for rank in batches]
    assert sum(map(len, batches)) == loader.num_micro_batches == len(loader)
    seen = sorted(itertools.chain(*itertools.chain(*batches)))
    if drop_last:
        assert len(seen) == len(set(seen)) == length // size * size
    else:
        assert seen == list(range(length))


def test_skipping_does_not_touch_the_dataset() -> None:
    """Building a loader and skipping any number of micro-batches reads no sample."""
    loader = DataLoader(Unread(), batch_size=3, shuffle=True).get_data_loader(True, skip=10**9)
    with pytest.raises(AssertionError, match="was read"):
        next(iter(loader))
    iter(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_global_generators_are_left_alone(workers: int) -> None:
    """Starting workers, and loading, draws nothing from the rank's generators."""

    def states() -> list[Any]:
        return [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]

    before = states()
    loader = DataLoader(Numbers(20), batch_size=2, shuffle=True, num_workers=workers)
    take(loader.get_data_loader(repeat=True, skip=3), 15)
    take(loader, 3)
    assert states() == before


@pytest.mark.long
def test_workers_augment_the_same_after_resuming() -> None:
    """As in the uninterrupted run, and with any number of workers."""

    def batches(workers: int, skip: int) -> list[Any]:
        loader = DataLoader(Augmented(9), batch_size=2, shuffle=True, num_workers=workers)
        return take(loader.get_data_loader(True, skip, 2, 1, seed=4), 9 - skip)

    whole = batches(workers=2, skip=0)
    assert batches(workers=2, skip=4) == whole[4:]
    assert batches(workers=1, skip=0) == whole


@pytest.mark.parametrize(
    "wrap",
    [pytest.param(lambda of: of, marks=pytest.mark.long), lambda of: data.Subset(of, range(9))],
)
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_a_dataset_is_told_each_epoch(workers: int, persistent: bool, wrap: Any) -> None:
    """In the workers too, and after a resume in a later epoch. Other passes tell it nothing."""
    own = ByEpoch(9)
    loader = DataLoader(
        wrap(own), batch_size=3, shuffle=True, num_workers=workers, persistent_workers=persistent
    )

    def epochs(skip: int = 0) -> list[int]:
        repeated = loader.get_data_loader(True, skip, num_replicas=2, rank=1)
        return [batch[0] for batch in take(repeated, 6 - skip)]

    assert epochs() == [0, 1, 1, 2, 3, 3]  # of the micro-batches 1, 3, 5, 7, 9, 11
    assert epochs(skip=4) == [3, 3]
    own.set_epoch(7)
    assert {each for (each, *_) in take(loader.get_data_loader(), 3)} == {7}


@pytest.mark.long
def test_augmentations_differ() -> None:
    """Micro-batches, epochs and ranks are augmented differently."""
    loader = DataLoader(Augmented(2), batch_size=1, num_workers=1)
    ranks = [loader.get_data_loader(True, 0, 2, rank) for rank in range(2)]
    noises = [batch[0][1] for rank in ranks for batch in take(rank, 4)]
    assert len(set(noises)) == len(noises)


def test_without_workers_augmentations_use_the_global_generators() -> None:
    """Nothing is reseeded: checkpoints restore these generators."""
    loader = DataLoader(Augmented(4), batch_size=2).get_data_loader()
    torch.manual_seed(8)
    expected = torch.rand(1).item()
    torch.manual_seed(8)
    assert take(loader, 1)[0][0][1] == pytest.approx(expected)


def test_own_generator_replaces_the_seed() -> None:
    """Order and augmentations depend only on the initial seed of the user's generator."""

    def batches(seed: int, draws: int) -> list[Any]:
        generator = torch.Generator().manual_seed(77)
        torch.rand(draws, generator=generator)
        loader = DataLoader(
            Augmented(12), batch_size=3, shuffle=True, num_workers=1, generator=generator
        )
        return take(loader.get_data_loader(repeat=True, seed=seed), 6)

    assert batches(seed=1, draws=1) == batches(seed=2, draws=5)


def test_each_iteration_outside_a_run_is_the_next_epoch() -> None:
    """Iterating over a DataLoader itself reshuffles; a run's loader repeats its epoch."""
    loader = DataLoader(Numbers(20), batch_size=20, shuffle=True)
    first, second = take(loader, 1), take(loader, 1)
    assert first != second
    epoch = loader.get_data_loader()
    assert take(epoch, 2) == take(epoch, 2) == first


def test_own_batch_sampler_and_sampler() -> None:
    """Samplers that the user wrote are sharded and resumed like torch's."""

    class Pairs:
        def __iter__(self) -> Iterator[list[int]]:
            order = torch.randperm(8).tolist()
            return iter([order[i : i + 2] for i in range(0, 8, 2)])

    both: list[dict[str, Any]] = [
        {"batch_sampler": Pairs()},
        {"sampler": [5, 3, 1], "batch_size": 2},
    ]
    for options in both:
        loader = DataLoader(Numbers(8), **options)
        whole = take(loader.get_data_loader(True, 0, 3, 2), 12)
        assert take(loader.get_data_loader(True, 5, 3, 2), 7) == whole[5:]


def test_without_batching() -> None:
    """With batch_size=None each sample is a micro-batch."""
    loader = DataLoader(Numbers(5), batch_size=None)
    shard = loader.get_data_loader(True, skip=1, num_replicas=2, rank=1)
    assert list(itertools.islice(iter(shard), 4)) == [3, 0, 2, 4]
    assert loader.num_micro_batches == 5


def test_own_collate_and_worker_init_are_used() -> None:
    """The user's collate_fn and worker_init_fn run in the workers."""
    loader = DataLoader(
        Numbers(4), batch_size=2, num_workers=1, collate_fn=_with_seed, worker_init_fn=_mark
    )
    assert [total for total, _ in loader] == [1, 5]
    assert all(marked for _, marked in loader)


_marked = False


def _mark(worker: int) -> None:
    global _marked
    _marked = True


def _with_seed(samples: list[int]) -> tuple[int, bool]:
    return sum(samples), _marked


@pytest.mark.parametrize("persistent", [False, True])
def test_an_epoch_repeats_with_workers(persistent: bool) -> None:
    """Every validation sees the same samples, with persistent workers or without."""
    loader = DataLoader(
        Augmented(5), batch_size=2, shuffle=True, num_workers=2, persistent_workers=persistent
    ).get_data_loader(seed=3)
    assert take(loader, 9) == take(loader, 9)


@pytest.mark.parametrize("shuffle", [False, True])
def test_empty_dataset_has_no_micro_batches(shuffle: bool) -> None:
    """The loader has length 0, shuffled or not; repeating it is refused."""
    loader = DataLoader(Numbers(0), shuffle=shuffle)
    assert loader.num_micro_batches == 0
    assert list(loader.get_data_loader()) == []
    with pytest.raises(TrialError, match="no items in epoch 0"):
        next(iter(loader.get_data_loader(repeat=True)))


def test_dataset_without_length_is_refused() -> None:
    """A map-style dataset without a length needs a sampler."""
    loader = DataLoader(NoLength())
    assert loader.num_micro_batches is None
    with pytest.raises(TypeError, match="no len"):
        len(loader)
    with pytest.raises(TrialError, match=r"NoLength has no len.*give it a __len__"):
        loader.get_data_loader()


def test_parameters_are_the_references() -> None:
    """The same parameters, order and defaults."""
    parameters = inspect.signature(DataLoader).parameters.values()
    assert [(p.name, p.default) for p in parameters][1:] == [
        ("batch_size", 1),
        ("shuffle", False),
        ("sampler", None),
        ("batch_sampler", None),
        ("num_workers", 0),
        ("collate_fn", None),
        ("pin_memory", False),
        ("drop_last", False),
        ("timeout", 0),
        ("worker_init_fn", None),
        ("multiprocessing_context", None),
        ("generator", None),
        ("prefetch_factor", None),
        ("persistent_workers", False),
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": -1}, "num_workers option should be non-negative"),
        ({"timeout": -1}, "timeout option should be non-negative"),
        ({"prefetch_factor": 2}, "prefetch_factor option could only be specified"),
        ({"persistent_workers": True}, "persistent_workers option needs num_workers > 0"),
        ({"sampler": [0], "shuffle": True}, "sampler option is mutually exclusive with shuffle"),
        ({"batch_sampler": [[0]], "drop_last": True}, "batch_sampler option is mutually exclusive"),
        ({"batch_size": None, "drop_last": True}, "batch_size=None option disables"),
        ({"batch_size": 0}, "batch_size should be a positive integer"),
    ],
)
def test_refuses_what_torch_refuses(options: dict[str, Any], message: str) -> None:
    """The constructor raises torch's own error."""
    with pytest.raises(ValueError, match=message):
        DataLoader(Numbers(3), **options)
    with pytest.raises(ValueError, match=message):
        data.DataLoader(Numbers(3), **options)
