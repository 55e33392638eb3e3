"""The report of a retraining: champion and challenger side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trial_core.common import text_format
from trial_core.models.journal import Challenger, Champion, PromotionDecision, RetrainingPlan
from trial_core.models.promotion_rule import PromotionRule
from trial_core.models.records import Version
from trial_core.observe.report.markdown import template

FILE = "retraining.md"
STARTS: Mapping[str, str] = {
    "scratch": "from scratch",
    "warm": "with the champion's weights",
    "continue": "with the champion's weights, optimizer, schedules and callbacks",
}


class ComparedMetric(NamedTuple):
    """A metric of champion and challenger, on the same data; None for a model without it."""

    name: str
    before: Any
    after: Any

    @property
    def change(self) -> str:
        """The challenger's value minus the champion's; empty if one is not a number."""
        if not text_format.is_number(self.before) or not text_format.is_number(self.after):
            return ""
        return f"{self.after - self.before:+.6g}"


@dataclass
class RetrainingFacts:
    """The contents of the report, filled in as the run proceeds."""

    model: str
    start: str
    rule: PromotionRule
    plan: RetrainingPlan
    champion: Version | None = None
    champion_result: Champion | None = None  # the champion's validation on the run's data
    challenger: Challenger | None = None
    outcome: PromotionDecision | None = None
    ended: str = ""  # how the run ended without an outcome, or failed after one
    failed_callbacks: Mapping[str, str] = field(default_factory=dict)  # the failures, by callback
    places: Mapping[str, str] = field(default_factory=dict)  # related objects, by their names

    def render(self) -> str:
        start = STARTS[self.start]
        if self.champion is None and self.start != "scratch":
            start = "from scratch: there was no champion"
        new = self.challenger or Challenger()
        return _TEMPLATE.render(
            facts=self,
            plan=self.plan,
            outcome=self.outcome,
            champion=self.champion,
            new=new,
            hyperparameters=json.dumps(new.hyperparameters, indent=2),
            metrics=self._metrics(),
            data=json.dumps(self.plan.data, indent=2),
            start=start,
        )

    def headline(self) -> str:
        if self.outcome is None:
            return self.ended or "running"
        number = self.challenger.version if self.challenger else None
        new = "the challenger" if number is None else f"version {number}"
        if self.outcome.promoted:
            return f"{new} promoted"
        kept = f"version {self.champion.number} kept" if self.champion else "no champion"
        return f"{kept}, {new} not promoted"

    def _metrics(self) -> list[ComparedMetric]:
        """All metrics, the one that decides first."""
        old = self.champion_result.metrics if self.champion_result else {}
        new = self.challenger.metrics if self.challenger else {}
        names = sorted({*old, *new}, key=lambda name: (name != self.rule.metric, name))
        return [ComparedMetric(name, old.get(name), new.get(name)) for name in names]


_TEMPLATE = template("retraining_report.md.j2")
