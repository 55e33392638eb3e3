"""Where ZeRO keeps the elements of each parameter."""

from __future__ import annotations

import torch
from hypothesis import given, strategies as st

from trial_core.deepspeed.reshard.parameter_state import Partitions

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=6)


def shapes(sizes: list[int]) -> list[dict[str, torch.Size]]:
    return [{f"p{i}": torch.Size([size]) for i, size in enumerate(sizes)}]


def elements(partitions: Partitions, partition_elements: int) -> list[tuple[str, int]]:
    """Every element of every parameter, in the order of ranks and of their partitions."""
    found = []
    for rank in range(partitions.ranks):
        end = 0
        for fragment in partitions.fragments(0, rank, partition_elements):
            assert end <= fragment.offset, "two parameters overlap"
            end = fragment.offset + fragment.count
            found += [(fragment.name, fragment.first + i) for i in range(fragment.count)]
        assert end <= partition_elements, "beyond the partition's end"
    return found


@given(SIZES, st.integers(1, 5), st.integers(0, 3))
def test_zero_1_and_2_cut_the_buffer(sizes: list[int], ranks: int, padding: int) -> None:
    """Every element lies on exactly one rank, in the order of the parameters."""
    paddings = [padding * (i % 2) for i in range(len(sizes))]
    partition_elements = -(-(sum(sizes) + sum(paddings)) // ranks)
    partitions = Partitions(shapes(sizes), [paddings], ranks, is_zero3=False)
    assert elements(partitions, partition_elements) == [
        (f"p{i}", element) for i, size in enumerate(sizes) for element in range(size)
    ]


@given(SIZES, st.integers(1, 5))
def test_zero_3_cuts_each_parameter(sizes: list[int], ranks: int) -> None:
    """Every element lies on exactly one rank, and rank 0 has a part of every parameter."""
    partition_elements = sum(-(-size // ranks) for size in sizes)
    partitions = Partitions(shapes(sizes), None, ranks, is_zero3=True)
    assert sorted(elements(partitions, partition_elements)) == sorted(
        (f"p{i}", element) for i, size in enumerate(sizes) for element in range(size)
    )
    names = {fragment.name for fragment in partitions.fragments(0, 0, partition_elements)}
    assert names == set(shapes(sizes)[0])
