"""Compares a challenger with the champion. Pure: no I/O, no clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from trial_core.checkpoint.manifest import Manifest
from trial_core.checkpoint.retention_policy import own_metric


@dataclass(frozen=True)
class Verdict:
    is_better: bool
    why: str


@dataclass(frozen=True)
class PromotionRule:
    """When a challenger is better than the champion: by more than `margin`, which is in units of
    the metric, and at least 0."""

    metric: str
    smaller_is_better: bool = True
    margin: float = 0.0

    def best_checkpoint(self, manifests: Sequence[Manifest]) -> Manifest | None:
        """The checkpoint with the best metric in its validation; the latest of equal ones. None if
        no checkpoint has a finite one; see `explain_no_best`."""

        def order(manifest: Manifest) -> tuple[float, int, str]:
            value = own_metric(manifest, self.metric) or 0.0
            better = -value if self.smaller_is_better else value
            return better, manifest.progress.batches_trained, manifest.created_at

        comparable = [each for each in manifests if own_metric(each, self.metric) is not None]
        return max(comparable, key=order, default=None)

    def explain_no_best(self, manifests: Sequence[Manifest]) -> str:
        if not manifests:
            return "the challenger saved no checkpoint"
        validated = [each for each in manifests if each.is_validated]
        if not validated:
            return "no checkpoint of the challenger was validated"
        last = max(validated, key=lambda each: each.progress.batches_trained)
        value = last.metrics.get("validation", {}).get(self.metric)
        if value is None:
            return f"the challenger's validation has no metric {self.metric}"
        return f"the challenger's {self.metric} is {value}, not a finite number"

    def compare(self, champion: float | None, challenger: float) -> Verdict:
        """Compare metrics measured on the same data, by their decimals as they are printed: 0.4 is
        better than 0.3 by exactly 0.1."""
        if not math.isfinite(challenger):
            return Verdict(False, f"the challenger's {self.metric} is {challenger}, not finite")
        seen = f"the challenger's {self.metric} {_shown(challenger, champion)}"
        if champion is None:
            return Verdict(True, f"{seen}, and there was no champion")
        if not math.isfinite(champion):
            return Verdict(True, f"{seen}, and the champion's is {champion}, not finite")
        values = f"{seen} against the champion's {_shown(champion, challenger)}"
        decrease = Decimal(repr(champion)) - Decimal(repr(challenger))
        gain = decrease if self.smaller_is_better else -decrease
        if gain > Decimal(repr(self.margin)):
            return Verdict(True, f"better by {_short(gain)}: {values}")
        if gain < 0:
            return Verdict(False, f"worse by {_short(-gain)}: {values}")
        if gain == 0:
            return Verdict(False, f"no better: {values}")
        return Verdict(
            False,
            f"better by {_short(gain)}, which is not more than the margin of {self.margin!r}: "
            f"{values}",
        )


def _shown(value: float, other: float | None) -> str:
    """A metric with 6 significant digits, or all of them if the other would look the same."""
    text = f"{value:.6g}"
    looks_equal = other is not None and value != other and text == f"{other:.6g}"
    return repr(value) if looks_equal else text


def _short(number: Decimal) -> str:
    return f"{number:.6g}" if number.is_finite() else str(float(number))
