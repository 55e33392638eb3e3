"""Whether a challenger is better than the champion, and in which words. Pure: no I/O, no clock."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal

from trial_core.checkpoint.manifest import Manifest
from trial_core.retention.policy import own_metric


@dataclass(frozen=True)
class Verdict:
    """What becomes of a challenger.

    Attributes:
        is_better: whether it is to take the champion's place.
        why: in words.
    """

    is_better: bool
    why: str


@dataclass(frozen=True)
class PromotionRule:
    """What is better.

    Attributes:
        metric: the validation metric that says so.
        smaller_is_better: which way it improves.
        margin: in its unit: better by more than this is better. At least 0.
    """

    metric: str
    smaller_is_better: bool = True
    margin: float = 0.0

    def best(self, manifests: Iterable[Manifest]) -> Manifest | None:
        """The best of a trial's checkpoints by its own validation, of equals the latest; None
        where none has a number."""

        def order(manifest: Manifest) -> tuple[float, int, str]:
            value = own_metric(manifest, self.metric) or 0.0
            better = -value if self.smaller_is_better else value
            return better, manifest.progress.batches_trained, manifest.created_at

        return max(self._comparable(manifests), key=order, default=None)

    def _comparable(self, manifests: Iterable[Manifest]) -> list[Manifest]:
        return [each for each in manifests if own_metric(each, self.metric) is not None]

    def why_none(self, manifests: Iterable[Manifest]) -> str:
        """Why none of a trial's checkpoints can be compared, in words."""
        manifests = list(manifests)
        if not manifests:
            return "the challenger has saved no checkpoint"
        validated = [
            each
            for each in manifests
            if each.progress.validated_at == each.progress.batches_trained
        ]
        if not validated:
            return "no checkpoint of the challenger was validated"
        last = max(validated, key=lambda each: each.progress.batches_trained)
        seen = last.metrics.get("validation", {}).get(self.metric)
        if seen is None:
            return f"the challenger's validation has no {self.metric}"
        return f"the challenger's {self.metric} is {seen}, not a number"

    def compare(self, champion: float | None, challenger: float) -> Verdict:
        """Whether the challenger's metric is better than the champion's, on the same data.

        The difference is that of the numbers as they are written in decimals, so that 0.4 is
        better than 0.3 by 0.1 and by no more.

        Args:
            champion: None: there is no champion.
        """
        if not math.isfinite(challenger):
            return Verdict(False, f"the challenger's {self.metric} is {challenger}, not finite")
        mine = f"{self.metric} {challenger!r}"
        if champion is None:
            return Verdict(True, f"{mine}, and there was no champion")
        if math.isnan(champion):
            return Verdict(True, f"{mine}, and the champion's is not a number")
        against = f"{mine} against the champion's {champion!r}"
        by = Decimal(repr(champion)) - Decimal(repr(challenger))
        gain = by if self.smaller_is_better else -by
        if gain > Decimal(repr(self.margin)):
            return Verdict(True, f"better by {_plain(gain)}: {against}")
        if gain < 0:
            return Verdict(False, f"worse by {_plain(-gain)}: {against}")
        if gain == 0:
            return Verdict(False, f"no better: {against}")
        return Verdict(
            False,
            f"better by {_plain(gain)}, which is not more than the margin of {self.margin!r}: "
            f"{against}",
        )


def _plain(number: Decimal) -> str:
    return f"{number:.6g}" if number.is_finite() else str(float(number))
