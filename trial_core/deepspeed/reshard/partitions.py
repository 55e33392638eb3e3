"""Where ZeRO keeps the elements of each parameter: arithmetic on shapes, no tensors.

ZeRO 1 and 2 lay the parameters of an optimizer group end to end in one flat buffer. The buffer is
cut into equal partitions, one for each data-parallel rank; a cut may go through a parameter. ZeRO-3
cuts every parameter into equal parts, and each rank lays its parts end to end. Both pad the end
before they cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

Shapes = Mapping[str, torch.Size]
"""Parameters by name, in the order of their buffer or optimizer group."""


@dataclass(frozen=True)
class Fragment:
    """Consecutive elements of one parameter, in the partition of one rank.

    Its first element has the index `first` in the flattened parameter, `offset` in the partition.
    """

    name: str
    first: int
    count: int
    offset: int


@dataclass(frozen=True)
class Partitions:
    """How an engine's parameters are cut.

    Attributes:
        buffers: the parameters of each flat buffer. A buffer is an optimizer group; under ZeRO-3
            it is a part of one.
        paddings: number of elements after each parameter of each buffer; None means no padding.
        is_zero3: True if each parameter is cut, not the buffer.
    """

    buffers: Sequence[Shapes]
    paddings: Sequence[Sequence[int]] | None
    ranks: int
    is_zero3: bool

    def fragments(self, buffer: int, rank: int, partition_elements: int) -> list[Fragment]:
        """The fragments in one rank's partition of a buffer. The last partition may be smaller."""
        sizes = {name: shape.numel() for name, shape in self.buffers[buffer].items()}
        fragments, position = list[Fragment](), 0
        if self.is_zero3:
            for name, size in sizes.items():
                part = zero3_part_elements(size, self.ranks)
                count = min(part, size - rank * part)
                if count > 0:
                    fragments.append(Fragment(name, rank * part, count, position))
                position += part
            return fragments
        begin, end = rank * partition_elements, (rank + 1) * partition_elements
        paddings = [0] * len(sizes) if self.paddings is None else self.paddings[buffer]
        for (name, size), padding in zip(sizes.items(), paddings, strict=True):
            first, last = max(position, begin), min(position + size, end)
            if first < last:
                fragments.append(Fragment(name, first - position, last - first, first - begin))
            position += size + padding
        return fragments


def zero3_part_elements(elements: int, ranks: int) -> int:
    """Number of elements of a parameter on each rank under ZeRO-3, padding included."""
    return -(-elements // ranks)
