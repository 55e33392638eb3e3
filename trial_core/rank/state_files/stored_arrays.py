"""numpy's arrays, numbers and dtypes in a state, stored as plain data.

numpy trusts a pickle's description of a dtype, including its flags and its size. So the writer of a
file could turn any address into an object, and no class of numpy is read from a pickle. An array is
stored as the bytes of an ``.npy`` file, which numpy reads without pickles. A number is stored as
its type's text and its bytes.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch

from trial_core.errors import CheckpointError

_KIND, _NPY, _BYTES = "trialflow.numpy", "npy", "bytes"
_SIMPLE = frozenset("biufcSUMm")
"""The kinds of dtypes that are numbers, text and times; a record (V) has several."""
_VERSION = (3, 0)  # of .npy
_UNREADABLE = (
    ValueError, TypeError, LookupError, AttributeError, OverflowError, MemoryError, RuntimeError,
    BufferError, SyntaxError,
)  # fmt: skip
"""The errors of numpy for bytes that are not an array."""


def is_storable(value: Any) -> bool:
    """Return whether this is an array, a number or a dtype of numpy's that holds no objects."""
    if type(value) in (np.ndarray, np.memmap) or isinstance(value, np.generic):
        return _has_no_objects(value.dtype)
    return isinstance(value, np.dtype) and _has_no_objects(value) and value.itemsize > 0


def _has_no_objects(dtype: np.dtype[Any]) -> bool:
    if dtype.hasobject or dtype.subdtype is not None:
        return False
    if dtype.kind in _SIMPLE:
        return True
    try:  # .npy does not tell of every layout
        described = np.lib.format.descr_to_dtype(np.lib.format.dtype_to_descr(dtype))
    except ValueError:
        return False
    return dtype.kind == "V" and bool(described == dtype)


def as_plain(value: Any) -> dict[str, Any]:
    """A storable value as a dict of text and bytes, which `with_arrays` turns back."""
    if isinstance(value, np.generic) and value.dtype.kind in _SIMPLE:
        number = np.asarray(value)
        return {_KIND: number.dtype.str, _BYTES: number.tobytes()}  # a tensor would be a file
    kind = "dtype" if isinstance(value, np.dtype) else "scalar"
    if isinstance(value, np.ndarray):
        kind = "array"
    file = io.BytesIO()
    array = np.empty(0, value) if kind == "dtype" else np.asarray(value)
    np.lib.format.write_array(file, array, _VERSION, allow_pickle=False)
    return {_KIND: kind, _NPY: torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)}


def without_numbers(key: Any) -> Any:
    """A key of a dict, or an item of a set, with numpy's numbers and text as Python's.

    Types that Python does not have stay: times, long doubles.
    """
    if isinstance(key, np.generic):
        return key.item() if key.dtype.kind in "biufcSU" else key
    if type(key) in (tuple, frozenset):
        return type(key)(map(without_numbers, key))
    return key


def with_arrays(content: Any) -> Any:
    """Turn the dicts of `as_plain` in `content` back into values. Changes containers.

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
        if value.keys() in ({_KIND, _NPY}, {_KIND, _BYTES}):
            known[id(value)] = _restored(value[_KIND], value.get(_NPY), value.get(_BYTES))
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


def _restored(kind: Any, npy: Any, data: Any) -> Any:
    try:
        if npy is None:
            return _number(kind, data)
        if type(npy) is not torch.Tensor or (npy.dtype, npy.dim()) != (torch.uint8, 1):
            raise ValueError(f"expected bytes, got {type(npy).__name__}")
        array = _array(io.BytesIO(npy.numpy().data), npy.numel())
    except _UNREADABLE as error:
        raise CheckpointError(f"an array of the checkpoint cannot be read: {error}") from error
    if kind == "dtype":
        return array.dtype
    return array if kind == "array" else array[()]


def _number(kind: Any, data: Any) -> np.generic:
    dtype = np.dtype(str(kind))
    if dtype.kind not in _SIMPLE or type(data) is not bytes or len(data) != dtype.itemsize:
        raise ValueError(f"expected the bytes of one number or text, got those of {dtype}")
    number: Any = np.frombuffer(data, dtype)[0]
    return number  # type: ignore[no-any-return]


def _array(file: io.BytesIO, size_bytes: int) -> np.ndarray[Any, Any]:
    if (version := np.lib.format.read_magic(file)) != _VERSION:
        raise ValueError(f"expected version {_VERSION} of .npy, got {version}")
    file.seek(0)
    array: np.ndarray[Any, Any] = np.lib.format.read_array(file, allow_pickle=False)
    if file.read(1) or array.size > size_bytes or not is_storable(array):
        raise ValueError(f"expected one array of numbers or text, got more, or {array.dtype}")
    return array
