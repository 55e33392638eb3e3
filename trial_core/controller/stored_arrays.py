"""numpy's arrays, numbers and dtypes in a state, stored as plain data.

numpy believes what a pickle says of a dtype, its flags and its size included: whoever writes a file
could make addresses of their choice into objects. So no class of numpy is read from a pickle. An
array is stored as the bytes of an ``.npy`` file, which numpy reads without pickles.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch

from trial_core.errors import CheckpointError

_KIND, _NPY = "trialflow.numpy", "npy"
_KINDS = frozenset("biufcSUMmV")
"""The kinds of dtypes that hold no objects: numbers, text, times, records of these."""


def is_storable(value: Any) -> bool:
    """Whether this is an array, a number or a dtype of numpy's that holds no objects."""
    if type(value) in (np.ndarray, np.memmap) or isinstance(value, np.generic):
        value = value.dtype
    return isinstance(value, np.dtype) and value.kind in _KINDS and not value.hasobject


def as_plain(value: Any) -> dict[str, Any]:
    """A storable value as a dict of text and a tensor: `with_arrays` makes it again."""
    kind = "dtype" if isinstance(value, np.dtype) else "scalar"
    if isinstance(value, np.ndarray):
        kind = "array"
    file = io.BytesIO()
    array = np.empty(0, value) if kind == "dtype" else np.asarray(value)
    np.lib.format.write_array(file, array, (3, 0), allow_pickle=False)
    return {_KIND: kind, _NPY: torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)}


def without_numbers(key: Any) -> Any:
    """A key of a dict, or an item of a set, with Python's numbers and text for numpy's."""
    if isinstance(key, np.generic):
        return key.item()
    if type(key) in (tuple, frozenset):
        return type(key)(map(without_numbers, key))
    return key


def with_arrays(content: Any) -> Any:
    """What was read, with the values of which `as_plain` has made dicts. Changes containers.

    Raises:
        CheckpointError: such a dict does not hold what `as_plain` writes.
    """
    return _with_arrays(content, {})


def _with_arrays(value: Any, known: dict[int, Any]) -> Any:
    if not isinstance(value, (dict, list, tuple)):
        return value
    if id(value) in known:  # shared, or within itself
        return known[id(value)]
    known[id(value)] = value
    if isinstance(value, dict):
        if value.keys() == {_KIND, _NPY}:
            known[id(value)] = _restored(value[_KIND], value[_NPY])
            return known[id(value)]
        for key, each in value.items():
            if (restored := _with_arrays(each, known)) is not each:
                value[key] = restored
    elif isinstance(value, list):
        for index, each in enumerate(value):
            if (restored := _with_arrays(each, known)) is not each:
                value[index] = restored
    elif type(value) is tuple:
        items = tuple(_with_arrays(each, known) for each in value)
        if any(item is not each for item, each in zip(items, value, strict=True)):
            known[id(value)] = items
    return known[id(value)]


def _restored(kind: Any, npy: Any) -> Any:
    try:
        if type(npy) is not torch.Tensor or (npy.dtype, npy.dim()) != (torch.uint8, 1):
            raise ValueError(f"expected bytes, got {type(npy).__name__}")
        file = io.BytesIO(npy.numpy().data)
        array = np.lib.format.read_array(file, allow_pickle=False)
        if file.read(1) or not is_storable(array):
            raise ValueError(f"expected one array of numbers or text, got more, or {array.dtype}")
    except (ValueError, TypeError, OverflowError, MemoryError, RuntimeError) as error:
        raise CheckpointError(f"an array of the checkpoint cannot be read: {error}") from error
    if kind == "dtype":
        return array.dtype
    return array if kind == "array" else array[()]
