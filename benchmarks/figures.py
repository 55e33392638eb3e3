"""Statistics of noisy measurements, and the JSON line that ends every benchmark."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Half of the central 95 % of a normal distribution, in standard deviations.
Z_95 = 1.96


@dataclass(frozen=True)
class Estimate:
    """A median with its confidence interval.

    Attributes:
        median: of the measurements.
        low, high: 95 % confidence interval of the median, by order statistics (no assumption about
            the distribution); the extremes if there are few measurements.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Estimate the median of at least one value."""
        ordered, count = sorted(values), len(values)
        margin = Z_95 * math.sqrt(count) / 2
        low = max(0, math.floor(count / 2 - margin))
        high = min(count - 1, math.ceil(count / 2 + margin) - 1)
        return cls(statistics.median(ordered), ordered[low], ordered[high])

    def shown(self, digits: int) -> str:
        """``median (low…high)``."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}…{self.high:.{digits}f})"


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the smallest of `values` that `percent` per cent of them do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def conclude(figures: Mapping[str, float], targets: Mapping[str, float]) -> None:
    """Print the last line of a benchmark: its figures as JSON.

    Args:
        figures: measurements by name; the name contains the unit.
        targets: maximum values for some of the figures.
    """
    missed = [name for name, target in targets.items() if figures[name] > target]
    for name in missed:
        print(f"target missed: {name} is {figures[name]:.4g}, the maximum is {targets[name]:g}")
    rounded = {name: float(f"{value:.4g}") for name, value in figures.items()}
    print(
        json.dumps(
            {
                "figures": {"cores": os.cpu_count() or 1, **rounded},
                "targets": dict(targets),
                "holds": not missed,
            }
        ),
        flush=True,
    )
