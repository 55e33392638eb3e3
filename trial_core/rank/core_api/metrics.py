"""The metrics that a Core API script reports, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trial_core.errors import TrialError
from trial_core.messages import check_integer


def checked_steps(value: Any, source: str) -> int:
    """The number of steps that `source` names.

    Raises:
        TrialError: the value is not an integer of at least 0.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TrialError(f"{source}: steps_completed is an integer of at least 0, got {value!r}")
    return value


def plain_metrics(metrics: Any, source: str) -> dict[str, Any]:
    """Metrics as plain data: tensors and arrays become numbers and lists.

    Raises:
        TrialError: `metrics` is not a mapping, or a value is neither plain nor an array, or is an
            integer that does not fit into 64 bits.
    """
    if not isinstance(metrics, Mapping):
        raise TrialError(
            f"{source}: metrics is a mapping of names to values, got {type(metrics).__name__}"
        )
    return {
        str(name): _plain(value, f'{source}: metric "{name}"') for name, value in metrics.items()
    }


def _plain(value: Any, place: str) -> Any:
    if isinstance(value, int):
        check_integer(value, place)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, place) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, place) for inner in value]
    if hasattr(value, "tolist"):  # a torch tensor, a NumPy array or scalar
        plain = value.tolist()
        while isinstance(plain, list) and len(plain) == 1:
            plain = plain[0]  # a loss of shape (1,) is a number, too
        if not hasattr(plain, "tolist"):  # NumPy has no Python number for a longdouble
            return _plain(plain, place)
    for kind in (int, float, str):  # a subclass, such as an enum, cannot be sent to the driver
        if isinstance(value, kind):
            return kind(value)
    raise TrialError(
        f"{place} is of type {type(value).__name__}; a metric is a number, text, an array, a "
        "tensor, or lists and mappings of these"
    )
