"""Data that are not the same on all ranks, or not those of the checkpoint."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import data

from trial_core.pytorch import DataLoader
from trial_core.rank.data.sample_lists import (
    SampleLists,
    differing_checkpoint,
    differing_ranks,
    sample_lists,
)

NAMES = [f"picture-{number:03}.png" for number in range(200)]


class Held(data.Dataset[Any]):
    """A dataset with these attributes, of which no sample may be read."""

    def __init__(self, length: int = len(NAMES), **attributes: Any) -> None:
        self.length = length
        vars(self).update(attributes)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a sample was read")


def found(**attributes: Any) -> SampleLists:
    return sample_lists(DataLoader(Held(**attributes)))


def shuffled(values: list[Any]) -> list[Any]:
    return random.Random(7).sample(values, len(values))


def labelled(names: list[str]) -> list[tuple[str, int]]:
    return [(name, int(name[8:11]) % 3) for name in names]


ORDERED: dict[str, Any] = {
    "names": lambda names: names,
    "paths": lambda names: tuple(Path("/data/pictures") / name for name in names),
    "pairs": labelled,
    "records": lambda names: [{"name": name, "size": 0.5} for name in names],
    "array": np.array,
    "labels": lambda names: [int(name[8:11]) for name in names],
    "tensor": lambda names: torch.tensor([[int(name[8:11]), 1] for name in names]),
    "class_to_idx": lambda names: {name: number for number, name in enumerate(names)},
}


@pytest.mark.parametrize("kind", ORDERED)
def test_another_order_is_another_digest(kind: str) -> None:
    """Of names, paths, labels and arrays of them; the same order is the same digest."""
    one, same, other = (
        found(kept=ORDERED[kind](each)) for each in (NAMES, [*NAMES], shuffled(NAMES))
    )
    assert differing_ranks([one, same], "training") is None
    assert "Held.kept" in (differing_ranks([one, other], "training") or "")


@pytest.mark.long
def test_a_table_of_pandas_is_compared() -> None:
    """Without its columns of floats."""
    pandas = pytest.importorskip("pandas")

    def table(names: list[str], floats: float = 0.1) -> SampleLists:
        return found(frame=pandas.DataFrame({"name": names, "weight": floats}))

    assert table(NAMES) == table(NAMES, floats=0.3)
    assert table(NAMES) != table(shuffled(NAMES))


@pytest.mark.parametrize(
    "kept",
    [
        pytest.param(lambda each: [f"/machine-{each}/data/{name}" for name in NAMES], id="folder"),
        pytest.param(lambda each: [each / 3] * len(NAMES), id="floats"),
        pytest.param(lambda each: torch.full((len(NAMES),), each / 3), id="tensor of floats"),
        pytest.param(lambda each: [each, 4], id="numbers that are not of samples"),
        pytest.param(lambda each: {"device": f"cuda:{each}", "rank": each}, id="settings"),
        pytest.param(lambda each: [f"rank {each}"], id="one text"),
        pytest.param(lambda each: {f"name {number}" for number in range(each)}, id="set"),
        pytest.param(lambda each: None if each else Failing(), id="an object"),
    ],
)
def test_what_may_differ_between_machines_is_not_compared(kept: Any) -> None:
    """The place of the data, values of floats, a rank's own settings."""
    assert differing_ranks([found(kept=kept(0)), found(kept=kept(1))], "training") is None


class Failing:
    """Every attribute of it, and every item, raises."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __len__(self) -> int:
        raise RuntimeError("len")


def test_datasets_and_samplers_within_are_compared() -> None:
    """A random split without a seed, a concatenation, and a sampler of indices."""

    def split(seed: int) -> SampleLists:
        torch.manual_seed(seed)
        part, rest = data.random_split(Held(names=NAMES), [120, 80])
        sampler = data.SubsetRandomSampler(torch.randperm(80).tolist())
        return sample_lists(DataLoader(data.ConcatDataset([part, rest]), sampler=sampler))

    assert split(1) == split(1)
    told = differing_ranks([split(1), split(2), split(1)], "validation")
    assert told is not None
    assert told.startswith("the validation data are not the same on all ranks: rank 0 has Subset")
    assert "Subset.indices, Subset.indices (2), SubsetRandomSampler.indices with" in told
    assert "than rank 1. So" in told
    assert "names" not in told


def test_numbers_of_samples_are_compared_between_ranks() -> None:
    """Also if the dataset keeps no list. A rank without data is left out."""
    found_here = [None, found(length=5), found(length=6)]
    told = differing_ranks(found_here, "training")
    assert told is not None
    assert "rank 1 has len(Held) with other entries or in another order than rank 2" in told
    assert differing_ranks([None, found(), None], "training") is None


def test_a_checkpoint_of_other_code_is_compared_as_far_as_it_goes() -> None:
    """Lists that one of the two has not are left out."""
    assert differing_checkpoint(found(before=NAMES), found(now=shuffled(NAMES))) is None
    assert differing_checkpoint({}, found(names=NAMES)) is None
    told = differing_checkpoint(found(names=NAMES), found(names=shuffled(NAMES), now=NAMES))
    assert told is not None
    assert "not those of the checkpoint: Held.names had other entries or another order" in told


def test_a_list_may_contain_itself_and_one_of_another_class_is_not_read() -> None:
    """Such a class may load what it gives."""
    own: list[Any] = ["a"]
    own += [own, own]
    assert [*found(own=own, other=Loading(NAMES))] == ["len(Held)", "Held.own"]


class Loading(list[Any]):
    """Loads each item."""

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("an item was read")

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("all items were read")
