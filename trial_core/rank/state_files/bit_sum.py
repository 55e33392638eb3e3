"""A number for the bits of a tensor, by which two tensors are compared without keeping both."""

from __future__ import annotations

import functools

import torch

_WORD_BYTES = 8
_COLUMNS = 256
_ROW_BYTES = _COLUMNS * _WORD_BYTES
_CPU_WORDS, _DEVICE_WORDS = 2**17, 2**22
"""Words at a time: bounds the memory. On a CPU, more would leave its cache."""


def bit_sum(
    part: torch.Tensor,
    first: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """A number for the bits of a tensor, which the numbers of its parts add up to.

    The bytes of the flattened tensor are read as 64-bit words, the last one filled up with zeros.
    Word k counts 2k + 1 times, so that an exchange of elements is seen, too. The sum is modulo
    2**64. The words are the rows of a matrix: its sums by row and by column need no product with
    each word, which takes twice as long.

    Args:
        part: consecutive elements of the flattened tensor.
        first: index of the first of them.
        dtype: cast the elements to this type before.
        device: where to sum; by default where the part is. Never has more than some of it.

    Returns:
        An integer on that device. Waits for no device where the part is.
    """
    flat, dtype, device = part.detach().reshape(-1), dtype or part.dtype, device or part.device
    words = _CPU_WORDS if device.type == "cpu" else _DEVICE_WORDS
    size = words * _WORD_BYTES // dtype.itemsize
    columns = _odd_numbers(device, _COLUMNS)
    twice_row = _odd_numbers(device, words // _COLUMNS + 1) - 1
    total = torch.zeros((), dtype=torch.int64, device=device)
    for begin in range(0, flat.numel(), size):
        content = flat[begin : begin + size].to(device).to(dtype).view(torch.uint8)
        word, before = divmod((first + begin) * dtype.itemsize, _WORD_BYTES)
        rows = -(-(before + content.numel()) // _ROW_BYTES)
        if before or content.storage_offset() % _WORD_BYTES or content.numel() % _ROW_BYTES:
            filled = content.new_zeros(rows * _ROW_BYTES)
            filled[before : before + content.numel()] = content
            content = filled
        matrix = content.view(torch.int64).view(rows, _COLUMNS)
        total = total + (matrix.sum(0) * columns).sum()
        total = total + (matrix.sum(1) * (twice_row[:rows] * _COLUMNS + 2 * word)).sum()
    return total


@functools.cache
def _odd_numbers(device: torch.device, count: int) -> torch.Tensor:
    return 2 * torch.arange(count, device=device) + 1
