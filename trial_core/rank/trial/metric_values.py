"""Converts the values of metrics, as a trial returns them, to plain data on the host.

Numbers, arrays, and nested lists of numbers are reduced over batches and ranks. Anything else that
JSON can hold (text, None, dicts, lists of arrays) is reported, not reduced.

Integers stay exact: an array of them has dtype int64, or object (Python's integers) if some do not
fit. Integers that messages between processes cannot hold are refused.

Callbacks get NumPy's numbers and arrays, as in Determined. Reported values are plain Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from trial_core.errors import TrialError
from trial_core.messages import check_integer

# A metric's value: a number, or nested lists of numbers, so that it can be written as JSON.
Value = float | int | list[Any]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Unreduced:
    """A copy of a value that is reported, not reduced. Its tensors are on their devices."""

    value: Any


# A metric's value in one call, as it is collected; None if the trial returned None.
Collected = torch.Tensor | Array | Unreduced | None


@dataclass(frozen=True)
class HostColumn:
    """A metric's values in all calls, on the host: NumPy's numbers and arrays, or plain data.

    `values` is an array if all are numbers or arrays. `numbers` has these stacked; None if there
    are none, or others that are not None.
    """

    values: Array | list[Any]
    numbers: Array | None

    def non_finite(self) -> Array:
        """Tell for each call whether its value is, or holds, NaN or infinite numbers."""
        calls = np.zeros(len(self.values), dtype=bool)
        if self.numbers is not None and self.numbers.dtype == np.float64:
            is_finite = np.isfinite(self.numbers.reshape(len(self.numbers), -1)).all(axis=1)
            calls[[each is not None for each in self.values]] = ~is_finite
        return calls


def collected(name: str, value: Any, source: str) -> Collected:
    """A copy of a metric's value, because the trial may reuse it. Does not wait for the device.

    Raises TrialError if the value is not made of numbers, text, None, arrays, lists and dicts, or
    is divided among the ranks, or an integer does not fit into 64 bits.
    """
    if isinstance(value, DTensor):
        if not all(each.is_replicate() for each in value.placements):
            raise TrialError(
                f'metric "{name}" returned by {source} is divided among the ranks (a DTensor); '
                "return its full_tensor(), which every rank must call"
            )
        value = value.to_local()
    if isinstance(value, torch.Tensor) and not value.is_complex():
        return value.detach().clone()
    if value is None:
        return None
    array = _checked(name, value, source)
    return array if array is not None else Unreduced(_copied(name, value, source))


def numeric(value: Any) -> Array | None:
    """A copy of a number, array or nested lists of numbers on the host: floats as float64.

    Other values give None: they are not reduced.
    """
    if isinstance(value, torch.Tensor):
        return None if value.is_complex() else _host_array(value.detach())
    is_nested = isinstance(value, (list, tuple)) and _holds_numbers(value)
    if not is_nested and not isinstance(value, (bool, int, float, np.generic, np.ndarray)):
        return None
    array = np.asarray(value)
    if array.dtype == object or (is_nested and array.dtype.kind == "f"):
        # NumPy makes floats of integers if some are negative and others beyond int64.
        whole = np.array(value, dtype=object)
        if all(isinstance(each, (int, np.integer, np.bool_)) for each in whole.flat):
            return _integers(np.asarray(np.frompyfunc(int, 1, 1)(whole), dtype=object))
    if array.dtype.kind not in "fiub":
        return None
    return array.astype(np.float64) if array.dtype.kind == "f" else _integers(array)


def check_integers(array: Array, place: str) -> None:
    """Refuse integers that no message can hold; see `check_integer`."""
    if array.dtype == object:
        for each in array.flat:
            check_integer(each, place)


def stack(arrays: Sequence[Array]) -> Array:
    """Arrays of one shape as one. If one has floats, all become floats."""
    is_float = any(array.dtype == np.float64 for array in arrays)
    return np.stack([array.astype(np.float64) for array in arrays] if is_float else arrays)


def sum_of(numbers: Array) -> Array:
    """The sum over the first axis. A sum of integers is exact, however large."""
    if numbers.dtype == np.int64 and numbers.size > 0:
        largest = max(int(numbers.max()), -int(numbers.min()))
        if largest * len(numbers) > np.iinfo(np.int64).max:
            numbers = numbers.astype(object)
    return np.asarray(numbers.sum(axis=0))


def as_reported(metrics: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Metrics that need no reduction, as JSON can hold them. An array of one element is a number.

    Raises TrialError as `plain_value`.
    """
    invalid = [name for name in metrics if not isinstance(name, str)]
    if invalid:
        raise TrialError(
            f"the names of metrics must be strings, but {source} gave a metric named "
            f"{invalid[0]!r} ({type_of(invalid[0])})"
        )
    return {name: _single(plain_value(name, value, source)) for name, value in metrics.items()}


def _single(plain: Any) -> Any:
    array = numeric(plain)
    return plain if array is None or array.size != 1 else array.item()


def for_callbacks(name: str, value: Any, source: str) -> Any:
    """A metric that needs no reduction: a tensor as an array, and other values unchanged.

    Raises TrialError as `plain_value`.
    """
    plain_value(name, value, source)
    if isinstance(value, torch.Tensor):
        value = numeric(value)
    return value[()] if isinstance(value, np.ndarray) else value  # without a dimension: a number


def plain_value(name: str, value: Any, source: str) -> Any:
    """The value of one metric as JSON can hold it: tensors and arrays become numbers and lists.

    Raises TrialError if the value is not made of numbers, text, None, arrays, lists and dicts, or
    an integer does not fit into 64 bits.
    """
    array = _checked(name, value, source)
    if array is not None:
        return as_plain(array)
    if value is None:
        return value
    if isinstance(value, str):
        return str.__str__(value)  # messages cannot hold a subclass, such as numpy's
    if isinstance(value, Mapping):
        return {str(key): plain_value(name, each, source) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(name, each, source) for each in value]
    raise TrialError(
        f'metric "{name}" returned by {source} is or holds a value {type_of(value)}; a metric is a '
        "number, text, None, a torch tensor or numpy array of real numbers, or a list or dict of "
        "these"
    )


def _copied(name: str, value: Any, source: str) -> Any:
    """A copy of a value that is not reduced, with its tensors on their devices."""
    if isinstance(value, torch.Tensor) and not value.is_complex():
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {str(key): _copied(name, each, source) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copied(name, each, source) for each in value]
    return plain_value(name, value, source)


def _checked(name: str, value: Any, source: str) -> Array | None:
    """Like `numeric`, but refuses integers that no message can hold."""
    array = numeric(value)
    if array is not None:
        check_integers(array, f'metric "{name}" returned by {source}')
    return array


def as_plain(value: Any) -> Value:
    """An array, or a number, as plain Python: a number, or nested lists of numbers."""
    result: Value = np.asarray(value).tolist()
    return result


def to_host(columns: Mapping[str, list[Collected]], method: str) -> dict[str, HostColumn]:
    """Each column on the host. Tensors of one device, type and shape share one transfer.

    Raises TrialError if numbers or arrays of one column differ in shape.
    """
    columns_of_kind: dict[Any, list[str]] = {}
    hosted: dict[str, HostColumn] = dict.fromkeys(columns, HostColumn([], None))  # keeps the order
    for name, column in columns.items():
        kinds = set(map(_kind, column))
        if len(kinds) == 1 and None not in kinds:
            columns_of_kind.setdefault(kinds.pop(), []).append(name)
        else:
            hosted[name] = _host_column(name, column, method)
    for names in columns_of_kind.values():
        values = [value for name in names for value in columns[name]]
        stacked = _host_array(torch.stack(values))  # type: ignore[arg-type]  # tensors, by _kind
        # All columns have the same length: every call returns every metric.
        calls = len(values) // len(names)
        parts = stacked.reshape(len(names), calls, *stacked.shape[1:])
        hosted.update(
            (name, HostColumn(part, part)) for name, part in zip(names, parts, strict=True)
        )
    return hosted


def mean_over_ranks(columns: Sequence[Array | list[Any]]) -> list[Any]:
    """The mean over ranks of each call's value; of values that are not reduced, the first rank's.

    The columns are each rank's `HostColumn.values` of one metric, of equally many calls.
    """
    if all(isinstance(column, np.ndarray) for column in columns):
        return list(np.mean(columns, axis=0))
    return [_mean([value for value in values if value is not None])
            for values in zip(*columns, strict=True)]  # fmt: skip


def _mean(values: list[Any]) -> Any:
    arrays = [array for array in map(numeric, values) if array is not None]
    if not values or len(arrays) < len(values):
        return values[0] if values else None
    return np.mean(arrays, axis=0)


def _host_column(name: str, column: list[Collected], method: str) -> HostColumn:
    arrays = [
        _host_array(value) if isinstance(value, torch.Tensor) else value
        for value in column
        if isinstance(value, (torch.Tensor, np.ndarray))
    ]
    if len(arrays) == len(column):
        stacked = _stacked(name, arrays, method)
        return HostColumn(stacked, stacked)
    is_reduced = arrays and not any(isinstance(value, Unreduced) for value in column)
    return HostColumn(
        [
            plain_value(name, value.value, method)
            if isinstance(value, Unreduced)
            else for_callbacks(name, value, method)
            for value in column
        ],
        _stacked(name, arrays, method) if is_reduced else None,
    )


def _kind(value: Collected) -> Any:
    """A key, equal for tensors that one transfer can move to the host; None for other values."""
    if isinstance(value, torch.Tensor):
        return value.device, value.dtype, value.shape
    return None


def _stacked(name: str, values: list[Array], method: str) -> Array:
    for index, value in enumerate(values):
        if value.shape != values[0].shape:
            raise TrialError(
                f'metric "{name}" has shape {value.shape} in call {index} of {method}, but '
                f"{values[0].shape} in the first; return its mean over the samples, or compute it "
                "in a reducer (context.wrap_reducer)"
            )
    return stack(values)


def _host_array(tensor: torch.Tensor) -> Array:
    # Widened on the host: not every accelerator has float64, and numpy has no bfloat16.
    tensor = tensor.cpu()
    if tensor.dtype == torch.uint64:
        return _integers(tensor.numpy())
    array: Array = tensor.to(torch.float64 if tensor.is_floating_point() else torch.int64).numpy()
    return array


def _integers(array: Array) -> Array:
    """A copy of integers as int64, or as Python's integers if some do not fit."""
    if array.dtype.kind in "uO" and array.size > 0:
        bounds = np.iinfo(np.int64)
        if int(array.min()) < bounds.min or int(array.max()) > bounds.max:
            return array.astype(object)
    return array.astype(np.int64)


def _holds_numbers(value: list[Any] | tuple[Any, ...]) -> bool:
    """True if nested lists hold only numbers, and all lists of a level have the same length."""
    if all(isinstance(item, (list, tuple)) for item in value):
        return len({len(item) for item in value}) <= 1 and all(map(_holds_numbers, value))
    return all(isinstance(item, (bool, int, float, np.generic)) for item in value)


def type_of(value: Any) -> str:
    """The type of a value, for an error message."""
    kind = f"of type {type(value).__name__}"
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return f"{kind} with dtype {value.dtype}"
    return kind
