"""A number for the bits of a tensor, which the numbers of its parts add up to.

The bytes of the flattened tensor are read as 64-bit words, the last one filled up with zeros. Word
k counts 2k + 1 times, so that an exchange of elements is seen, too. The sum is modulo 2**64.
"""

from __future__ import annotations

import functools

import torch

WORD_BYTES = 8
_CPU_WORDS, _DEVICE_WORDS = 2**17, 2**22
"""Words at a time: bounds the memory. On a CPU, more would be slower, because of new pages."""


def bit_sum(part: torch.Tensor, first: int = 0, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The sum over a part of a tensor: an integer on its device. Waits for no device.

    Args:
        part: consecutive elements of the flattened tensor.
        first: index of the first of them.
        dtype: cast the elements to this type before.
    """
    flat, dtype = part.detach().reshape(-1), dtype or part.dtype
    size = _CPU_WORDS if part.device.type == "cpu" else _DEVICE_WORDS
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    for begin in range(0, flat.numel(), size):
        content = flat[begin : begin + size].to(dtype).view(torch.uint8)
        word, before = divmod((first + begin) * dtype.itemsize, WORD_BYTES)
        count = -(-(before + content.numel()) // WORD_BYTES)
        if before or content.storage_offset() % WORD_BYTES or content.numel() % WORD_BYTES:
            filled = content.new_zeros(count * WORD_BYTES)
            filled[before : before + content.numel()] = content
            content = filled
        words = content.view(torch.int64)
        products = words * _weights(part.device, size + 1)[:count]
        total = total + products.sum() + words.sum() * (2 * word)
    return total


@functools.cache
def _weights(device: torch.device, count: int) -> torch.Tensor:
    return 2 * torch.arange(count, device=device) + 1
