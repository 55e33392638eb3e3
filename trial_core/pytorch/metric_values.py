"""The values of metrics: converts what a trial returns to numbers on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from trial_core.errors import TrialError

# A metric's value: a number, or nested lists of numbers, so that it can be written as JSON.
Value = float | int | list[Any]
Array = np.ndarray[Any, Any]


def as_array(name: str, value: Any, source: str) -> Array:
    """A metric's value as an array of float64 or int64, on the host.

    Args:
        source: the method or reducer that returned the value, for the message.

    Raises:
        TrialError: the value is neither a number nor an array (or nested lists) of numbers.
    """
    if isinstance(value, torch.Tensor) and not value.is_complex():
        return _host_array(value.detach())
    array = None
    nested = isinstance(value, (list, tuple)) and _holds_numbers(value)
    if nested or isinstance(value, (bool, int, float, np.generic, np.ndarray)):
        array = np.asarray(value)
    if array is None or array.dtype.kind not in "fiub":
        raise TrialError(
            f'metric "{name}" returned by {source} is {type_of(value)}; a metric is a number, or '
            "an array or list of numbers (equally long lists, if nested): a Python number, a torch "
            "tensor, a numpy array or scalar"
        )
    # A copy: the trial may reuse its array.
    return array.astype(np.float64 if array.dtype.kind == "f" else np.int64)


def as_reported(metrics: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Metrics that need no reduction, as JSON can hold them.

    Args:
        source: the method, hook or reducer that gave the metrics, for the message.

    Raises:
        TrialError: a value is not made of numbers, text, None, arrays, lists and dicts.
    """
    invalid = [name for name in metrics if not isinstance(name, str)]
    if invalid:
        raise TrialError(
            f"the names of metrics must be strings, but {source} gave a metric named "
            f"{invalid[0]!r} ({type_of(invalid[0])})"
        )
    return {name: plain_value(name, value, source) for name, value in metrics.items()}


def plain_value(name: str, value: Any, source: str) -> Any:
    """The value of one metric as JSON can hold it: tensors and arrays become numbers and lists.

    Raises:
        TrialError: the value is not made of numbers, text, None, arrays, lists and dicts.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value)  # numpy's float64 is a float
    if isinstance(value, Mapping):
        return {str(key): plain_value(name, each, source) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(name, each, source) for each in value]
    return as_plain(as_array(name, value, source))


def as_plain(value: Array) -> Value:
    """An array as plain Python: a number, or nested lists of numbers."""
    result: Value = value.tolist()
    return result


def to_host(columns: Mapping[str, list[torch.Tensor | Array]], method: str) -> dict[str, Array]:
    """Each column as one array. Columns of one device, type and shape share one transfer.

    Args:
        columns: for each metric its values, one for each call of `method`.

    Raises:
        TrialError: values of one column differ in shape.
    """
    columns_of_kind: dict[Any, list[str]] = {}
    hosted: dict[str, Array] = dict.fromkeys(columns, np.empty(0))  # keeps the order
    for name, column in columns.items():
        kinds = set(map(_kind, column))
        if len(kinds) == 1 and None not in kinds:
            columns_of_kind.setdefault(kinds.pop(), []).append(name)
        else:
            hosted[name] = _stacked(name, [as_array(name, v, method) for v in column], method)
    for names in columns_of_kind.values():
        values = [value for name in names for value in columns[name]]
        stacked = _host_array(torch.stack(values))  # type: ignore[arg-type]  # tensors, by _kind
        # All columns have the same length: every call returns every metric.
        calls = len(values) // len(names)
        parts = stacked.reshape(len(names), calls, *stacked.shape[1:])
        hosted.update(zip(names, parts, strict=True))
    return hosted


def _kind(value: torch.Tensor | Array) -> Any:
    """Equal for tensors that one transfer can move to the host; None for arrays."""
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
    return np.stack(values)


def _host_array(tensor: torch.Tensor) -> Array:
    # Widened on the host: not every accelerator has float64, and numpy has no bfloat16.
    array: Array = (
        tensor.cpu().to(torch.float64 if tensor.is_floating_point() else torch.int64).numpy()
    )
    return array


def _holds_numbers(value: list[Any] | tuple[Any, ...]) -> bool:
    """Whether nested lists hold only numbers, and all lists of a level have the same length."""
    if all(isinstance(item, (list, tuple)) for item in value):
        return len({len(item) for item in value}) <= 1 and all(map(_holds_numbers, value))
    return all(isinstance(item, (bool, int, float, np.generic)) for item in value)


def type_of(value: Any) -> str:
    """The type of a value, for an error message."""
    kind = f"of type {type(value).__name__}"
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return f"{kind} with dtype {value.dtype}"
    return kind
