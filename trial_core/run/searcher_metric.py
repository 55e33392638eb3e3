"""The searcher metric: the validation metric that decides which checkpoint is best."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trial_core.errors import TrialError


def searcher_metric(metrics: Mapping[str, Any], name: str) -> float:
    """The value of the searcher metric `name`.

    Raises:
        TrialError: the metric is missing or not a number.
    """
    value = metrics.get(name)
    if name not in metrics:
        raise not_reported(name, metrics)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TrialError(
            f'searcher.metric "{name}" must be a number, but the trial reports {value!r}'
        )
    return float(value)


def with_single_number(metrics: dict[str, Any], name: str | None) -> dict[str, Any]:
    """`metrics`, where the metric `name` is its number if it is an array of one element.

    Trials return a loss of shape (1,), too. All readers of metrics look for a number.
    """
    value = metrics.get(name) if name is not None else None
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    return metrics if name not in metrics else {**metrics, name: value}


def not_reported(name: str, reported: Iterable[str]) -> TrialError:
    """The error of a trial that reports other validation metrics than `name`."""
    return TrialError(
        f'searcher.metric "{name}" is not among the validation metrics that the trial reports: '
        f"{', '.join(sorted(reported)) or 'none'}. Set searcher.metric to one of these, or report "
        f'"{name}" in the trial\'s validation'
    )
