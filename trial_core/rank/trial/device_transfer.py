"""Moves a nested batch to a device."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)

# The usual types of a batch on the device.
TorchData = dict[str, torch.Tensor] | Sequence[torch.Tensor] | torch.Tensor


def to_device(data: Any, device: torch.device | str, warned_types: set[type] | None = None) -> Any:
    """`data` with all its tensors and arrays as tensors on `device`.

    Searches dicts, lists, tuples and named tuples, and keeps their types. Calls the method ``to``
    of other objects that have one. Anything else is returned unchanged, with one warning for each
    type that is not among the `warned_types`, to which it is added.
    """
    warned = set() if warned_types is None else warned_types
    if isinstance(data, torch.Tensor):
        if data.device == device:
            return data
        # Non-blocking only to a GPU: a copy to the host could be read before it is complete.
        return data.to(device, non_blocking=torch.device(device).type == "cuda")
    if type(data) is list:
        return [to_device(item, device, warned) for item in data]
    if isinstance(data, np.ndarray) and data.dtype.kind in "biufc":
        # torch refuses negative strides and foreign byte orders, and warns of read-only arrays.
        native = data.astype(data.dtype.newbyteorder("="), copy=not data.flags.writeable)
        return torch.from_numpy(np.asarray(native, order="C")).to(device)
    if callable(getattr(type(data), "to", None)):
        return data.to(device)
    if isinstance(data, Mapping):
        of_dict = {key: to_device(value, device, warned) for key, value in data.items()}
        if type(data) is dict or not isinstance(data, MutableMapping):
            return of_dict
        # A copy keeps the attributes of the type, such as a default factory.
        same_type = copy.copy(data)
        same_type.update(of_dict)
        return same_type
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(item, device, warned) for item in data))
    if isinstance(data, (list, tuple)):
        return type(data)([to_device(item, device, warned) for item in data])
    if type(data) not in warned:
        warned.add(type(data))
        logger.warning(
            f"to_device leaves objects of type {type(data).__name__} where they are: it moves "
            "tensors and numeric numpy arrays, also in dicts, lists and tuples, and objects with a "
            "method to(device)"
        )
    return data
