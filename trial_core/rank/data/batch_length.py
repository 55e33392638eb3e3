"""The number of records in a nested batch. Follows Determined's `get_batch_length`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from trial_core.errors import TrialTypeError, TrialValueError


def data_length(batch: Any) -> int:
    """The first dimension of the first tensor or array in `batch`, depth first.

    Searches dicts, lists and tuples. Skips tensors and arrays without a dimension.

    Raises:
        TrialTypeError: none is found, and `batch` is not a container.
        TrialValueError: none is found in a dict, list or tuple.
    """
    for found in _tensors(batch):
        if found.ndim > 0:
            return int(found.shape[0])
    is_container = isinstance(batch, (Mapping, list, tuple))
    raise (TrialValueError if is_container else TrialTypeError)(
        f"get_batch_length found no tensor or array with a first dimension in a batch of type "
        f"{type(batch).__module__}.{type(batch).__qualname__} (it searches dicts, lists and "
        "tuples); override get_batch_length to count the records of such a batch"
    )


def _tensors(data: Any) -> Iterator[torch.Tensor | np.ndarray[Any, Any]]:
    if isinstance(data, (torch.Tensor, np.ndarray)):
        yield data
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from _tensors(value)
    elif isinstance(data, (list, tuple)):
        for item in data:
            yield from _tensors(item)
