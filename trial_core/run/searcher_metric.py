"""The searcher's metric: the validation metric that says which checkpoint is best."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trial_core.errors import TrialError


def searcher_metric(metrics: Mapping[str, Any], name: str) -> float:
    """The metric that says which checkpoint is best.

    Raises:
        TrialError: there is none of that name, or it is no number.
    """
    value = metrics.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        seen = ", ".join(sorted(metrics)) or "none at all"
        what = "is not among" if name not in metrics else f"is {value!r}, no number, among"
        raise TrialError(
            f'searcher.metric "{name}" {what} the validation metrics that the trial reports: {seen}'
        )
    return float(value)
