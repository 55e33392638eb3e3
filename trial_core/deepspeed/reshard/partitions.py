"""Where ZeRO keeps the elements of each parameter: arithmetic, for what is saved and what is live.

ZeRO 1 and 2 lay a group's parameters end to end and cut that into as many equal partitions as there
are data-parallel ranks; a cut may go through a parameter. ZeRO-3 cuts each parameter by itself, and
lays the ranks' parts end to end. Both pad at the end of what they cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Fragment:
    """A part of a parameter, in a rank's partition.

    Attributes:
        name: the parameter's.
        first: the first of its elements that lies there, of the parameter flattened.
        count: how many do; at least one.
        offset: where in the partition they begin.
    """

    name: str
    first: int
    count: int
    offset: int


@dataclass(frozen=True)
class Partitions:
    """How an engine's parameters are cut.

    Attributes:
        buffers: the parameters of each flat buffer in the order in which they lie there, with their
            shapes. A buffer is an optimizer's group of parameters; under ZeRO-3 a part of one.
        paddings: elements behind each parameter of each buffer; None: there are none.
        ranks: how many data-parallel ranks share them.
        cuts_each: whether each parameter is cut by itself (ZeRO-3).
    """

    buffers: Sequence[Mapping[str, torch.Size]]
    paddings: Sequence[Sequence[int]] | None
    ranks: int
    cuts_each: bool

    def pieces(self, buffer: int, rank: int, partition: int) -> list[Fragment]:
        """What lies in a rank's partition of a buffer.

        Args:
            partition: elements in each partition of the buffer but the last, which may have fewer.
        """
        sizes = {name: shape.numel() for name, shape in self.buffers[buffer].items()}
        if self.cuts_each:
            return _cut_each(sizes, self.ranks, rank)
        paddings = [0] * len(sizes) if self.paddings is None else self.paddings[buffer]
        return _cut_through(sizes, paddings, partition, rank)


def part_of_each(elements: int, ranks: int) -> int:
    """How many elements of a parameter each rank has under ZeRO-3, padding included."""
    return -(-elements // ranks)


def _cut_through(
    sizes: Mapping[str, int], paddings: Sequence[int], partition: int, rank: int
) -> list[Fragment]:
    begin, end = rank * partition, (rank + 1) * partition
    pieces, place = [], 0
    for (name, size), padding in zip(sizes.items(), paddings, strict=True):
        first, last = max(place, begin), min(place + size, end)
        if first < last:
            pieces.append(Fragment(name, first - place, last - first, first - begin))
        place += size + padding
    return pieces


def _cut_each(sizes: Mapping[str, int], ranks: int, rank: int) -> list[Fragment]:
    pieces, offset = [], 0
    for name, size in sizes.items():
        part = part_of_each(size, ranks)
        count = min(part, size - rank * part)
        if count > 0:
            pieces.append(Fragment(name, rank * part, count, offset))
        offset += part
    return pieces
