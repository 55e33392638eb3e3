"""Where ZeRO keeps the elements of each parameter."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from trial_core.deepspeed.reshard.partitions import Partitions

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=6)


def shapes(sizes: list[int]) -> list[dict[str, torch.Size]]:
    return [{f"p{i}": torch.Size([size]) for i, size in enumerate(sizes)}]


def elements(cut: Partitions, ranks: int, partition: int) -> list[tuple[str, int]]:
    """Every element of every parameter, in the order of ranks and of their partitions."""
    found = []
    for rank in range(ranks):
        end = 0
        for piece in cut.pieces(0, rank, partition):
            assert end <= piece.offset, "two parameters at one place"
            end = piece.offset + piece.count
            found += [(piece.name, piece.first + i) for i in range(piece.count)]
        assert end <= partition, "beyond the partition's end"
    return found


@given(SIZES, st.integers(1, 5), st.integers(0, 3))
def test_a_group_is_cut_through(sizes: list[int], ranks: int, padding: int) -> None:
    """ZeRO 1 and 2: every element lies on one rank, in the order of the parameters."""
    paddings = [padding * (i % 2) for i in range(len(sizes))]
    partition = -(-(sum(sizes) + sum(paddings)) // ranks)
    cut = Partitions(shapes(sizes), [paddings], ranks, cuts_each=False)
    assert elements(cut, ranks, partition) == [
        (f"p{i}", element) for i, size in enumerate(sizes) for element in range(size)
    ]


@given(SIZES, st.integers(1, 5))
def test_each_parameter_is_cut(sizes: list[int], ranks: int) -> None:
    """ZeRO-3: every element lies on one rank, and each rank has some of every larger parameter."""
    partition = sum(-(-size // ranks) for size in sizes)
    cut = Partitions(shapes(sizes), None, ranks, cuts_each=True)
    found = elements(cut, ranks, partition)
    assert sorted(found) == sorted(
        (f"p{i}", element) for i, size in enumerate(sizes) for element in range(size)
    )
    assert {piece.name for piece in cut.pieces(0, 0, partition)} == set(shapes(sizes)[0])
