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


def not_reported(name: str, reported: Iterable[str]) -> TrialError:
    """The error for a trial that reports other validation metrics than `name`."""
    return TrialError(
        f'searcher.metric "{name}" is not among the validation metrics that the trial reports: '
        f"{', '.join(sorted(reported)) or 'none'}. Set searcher.metric to one of these, or report "
        f'"{name}" in the trial\'s validation'
    )
