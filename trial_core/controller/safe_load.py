"""Reading what a checkpoint holds, without running what somebody may have hidden in it."""

from __future__ import annotations

import datetime
import pathlib
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from trial_core.errors import CheckpointError

try:
    from numpy._core import multiarray
except ImportError:  # numpy 1
    from numpy.core import multiarray  # type: ignore[no-redef]

_DEEPSPEED = (DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address)
_NUMPY: tuple[Any, ...] = (
    np.ndarray, np.dtype, multiarray._reconstruct, multiarray.scalar,
    *{type(np.dtype(code)) for code in np.typecodes["All"] if code != "O"},
)  # fmt: skip
_PLAIN = (
    frozenset, range, slice,
    datetime.datetime, datetime.date, datetime.timedelta, datetime.timezone,
    pathlib.PosixPath, pathlib.PurePosixPath,
)  # fmt: skip

ALLOWED: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    *_DEEPSPEED, *_NUMPY, *_PLAIN
]  # fmt: skip
"""What may be constructed besides what torch allows by itself: none of it runs code."""


class Reader:
    """Reads files that `torch.save` wrote.

    Args:
        trusted: whether they may construct objects of any class (``checkpointing.trusted``).
    """

    def __init__(self, trusted: bool = False) -> None:
        self._trusted = trusted

    def load(self, path: Path, map_location: Any = None, mapped: bool = False) -> Any:
        """What the file holds.

        Args:
            mapped: leave tensors in the file until they are used, if it can be mapped.

        Raises:
            CheckpointError: it would construct an object of a class that is not known to be safe.
        """
        mmap = mapped and zipfile.is_zipfile(path)  # torch's older format cannot be mapped
        if self._trusted:
            return torch.load(path, map_location=map_location, weights_only=False, mmap=mmap)
        try:
            with safe_globals(ALLOWED):
                return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{path.name} {_what_is_in(path)}, and reading such objects can run code. If you "
                "trust whoever wrote this checkpoint, set checkpointing.trusted: true (trialflow "
                "export: --trusted); for single classes, call "
                "torch.serialization.add_safe_globals([…]) in the trial's module "
                f"[{_first_line(error)}]"
            ) from None

    def load_mapped(self, path: Path) -> Any:
        """What the file holds, its tensors on the CPU and in the file until they are used."""
        return self.load(path, "cpu", mapped=True)


def unreadable_classes(path: Path) -> list[str]:
    """Classes in a file that are read only where checkpoints are trusted, as dotted names."""
    with safe_globals(ALLOWED):
        return sorted(get_unsafe_globals_in_checkpoint(path))


def _what_is_in(path: Path) -> str:
    try:
        classes = unreadable_classes(path)
    except (pickle.UnpicklingError, ValueError, RuntimeError):  # of the old format
        classes = []
    return f"holds objects of {', '.join(classes) or 'some class that is not on the list'}"


def _first_line(error: Exception) -> str:
    *_, cause = str(error).split("WeightsUnpickler error:")
    return cause.strip().partition("\n")[0]
