"""DeepSpeed's data loaders, made usable as the loaders of a trial."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from deepspeed.runtime.dataloader import DeepSpeedDataLoader, RepeatingLoader


class _SeparatePasses:
    """A `DeepSpeedDataLoader` whose passes do not disturb the passes of its other users.

    Its `__iter__` returns the loader itself. So a trial that trains and validates with one loader
    would continue to train on the validation's pass.
    """

    def __init__(self, loader: DeepSpeedDataLoader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        passing: Iterator[Any] = iter(copy.copy(self._loader))
        return passing


def finite(loader: Any) -> Any:
    """The loader inside a `RepeatingLoader`: it ends, and has a length. Others are unchanged."""
    while isinstance(loader, RepeatingLoader):
        loader = loader.loader
    return loader


def finite_and_separate(loader: Any) -> Any:
    """Like `finite`; the passes of a `DeepSpeedDataLoader` are separate from all others."""
    loader = finite(loader)
    return _SeparatePasses(loader) if isinstance(loader, DeepSpeedDataLoader) else loader
