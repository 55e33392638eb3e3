"""Seeds, and random generators that are separate from training's.

A loader's order must depend only on its seed and the epoch. Loading must not advance the global
generators of Python, numpy and torch: the user's model draws from them, checkpoints hold their
state, and a resumed run must draw the same numbers as the uninterrupted run.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed for one purpose: ``derive_seed(7, "shuffle", 2)``.

    The same in every process. Unlike a sum's, results of neighbouring seeds and epochs are
    unrelated.
    """
    text = "/".join(str(part) for part in parts)
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator_for(*parts: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(*parts))


def seed_globals(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch (CPU) in this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Not torch.manual_seed: it would reseed the accelerators too.
    torch.default_generator.manual_seed(seed)


def isolated(items: Iterator[T], chunk: int = 1) -> Iterator[T]:
    """The same items, with global generators that only `items` uses.

    While `items` runs, the global generators have the state in which `items` last left them; at all
    other times, the state of the rest of the process. `items` should begin with `seed_globals`.

    Args:
        chunk: how many items to fetch at a time. Switching the state costs about 0.1 ms.
    """
    inside: _Globals | None = None
    while True:
        outside = _capture()
        if inside is not None:
            _restore(inside)
        try:
            fetched = list(itertools.islice(items, chunk))
        finally:
            inside = _capture()
            _restore(outside)
        if not fetched:
            return
        yield from fetched


_Globals = tuple[Any, Any, torch.Tensor]


def _capture() -> _Globals:
    return (
        random.getstate(),
        np.random.get_state(legacy=False),
        torch.default_generator.get_state(),
    )


def _restore(state: _Globals) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.default_generator.set_state(state[2])
