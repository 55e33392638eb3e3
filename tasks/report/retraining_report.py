"""The report of a retraining: champion and challenger side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prefect.exceptions import PrefectException
from prefect.logging import get_run_logger

from trial_core import text_format
from trial_core.errors import StorageError
from trial_core.models.journal import (
    REPORT,
    Challenger,
    Champion,
    Journal,
    PromotionDecision,
    RetrainingPlan,
)
from trial_core.models.promotion_rule import PromotionRule
from trial_core.models.records import Version
from trialflow.tasks.report.artifact import MarkdownArtifact, ReportArtifact
from trialflow.tasks.report.markdown import escaped as said

FILE = "retraining.md"
STARTS: Mapping[str, str] = {
    "scratch": "from scratch",
    "warm": "with the champion's weights",
    "continue": "with the champion's weights, optimizer, schedules and callbacks",
}


@dataclass
class RetrainingFacts:
    """The contents of the report, filled in as the run proceeds.

    Attributes:
        model: name of the model.
        start: what the challenger starts from.
        rule: when a challenger is better.
        plan: the plan of the run.
        champion: the version to compare with; None: there is none.
        champion_result: its validation on the run's data.
        challenger: the trained challenger.
        outcome: whether it was promoted.
        ended: how the run ended without an outcome, or failed after it.
        failed_callbacks: what failed, by callback.
        places: related objects and where they are.
    """

    model: str
    start: str
    rule: PromotionRule
    plan: RetrainingPlan
    champion: Version | None = None
    champion_result: Champion | None = None
    challenger: Challenger | None = None
    outcome: PromotionDecision | None = None
    ended: str = ""
    failed_callbacks: Mapping[str, str] | None = None
    places: Mapping[str, str] | None = None

    def render(self) -> str:
        """The report as Markdown."""
        lines = [
            f"# {said(self.model)}",
            "",
            f"**{said(self.headline())}**",
            "",
            *self._why(),
            *self._versions(),
            *self._metrics(),
            *self._data(),
            *self._times(),
            *(f"- {what}: `{where}`" for what, where in (self.places or {}).items()),
            "",
        ]
        return "\n".join(lines)

    def headline(self) -> str:
        """The outcome in a few words."""
        if self.outcome is None:
            return self.ended or "running"
        number = self.challenger.version if self.challenger else None
        new = "the challenger" if number is None else f"version {number}"
        if self.outcome.promoted:
            return f"{new} promoted"
        kept = f"version {self.champion.number} kept" if self.champion else "no champion"
        return f"{kept}, {new} not promoted"

    def _why(self) -> list[str]:
        lines = [] if self.outcome is None else [said(self.outcome.why), ""]
        if self.outcome is not None and self.ended:
            lines += [f"After the decision the run {said(self.ended)}", ""]
        for name, problem in (self.failed_callbacks or {}).items():
            lines += [f"Callback {said(name)} failed: {said(problem)}", ""]
        return lines

    def _versions(self) -> list[str]:
        rows = []
        if (old := self.champion) is not None:
            rows.append(
                f"| champion | {old.number} | `{old.checkpoint}` | `{old.trial}` | "
                f"{old.batches_trained} |"
            )
        if (new := self.challenger) is not None and new.checkpoint is not None:
            rows.append(
                f"| challenger | {new.version} | `{new.checkpoint}` | `{self.plan.trial}` | "
                f"{new.batches_trained} |"
            )
        if not rows:
            return []
        head = ["| | version | checkpoint | trial | batches |", "|---|---:|---|---|---:|"]
        return [*head, *rows, ""]

    def _metrics(self) -> list[str]:
        """All metrics of champion and challenger on the same data, with differences."""
        old = self.champion_result.metrics if self.champion_result else {}
        new = self.challenger.metrics if self.challenger else {}
        names = sorted({*old, *new}, key=lambda name: (name != self.rule.metric, name))
        if not names:
            return []
        rows = []
        for name in names:
            mark = " (decides)" if name == self.rule.metric else ""
            before, after = old.get(name), new.get(name)
            cells = [f"{said(name)}{mark}", _shown(before), _shown(after), _change(before, after)]
            rows.append(f"| {' | '.join(cells)} |")
        better = "smaller" if self.rule.smaller_is_better else "larger"
        return [
            "## On the same data",
            "",
            "| metric | champion | challenger | challenger - champion |",
            "|---|---:|---:|---:|",
            *rows,
            "",
            f"{better} is better, by more than {self.rule.margin!r}",
            "",
        ]

    def _data(self) -> list[str]:
        if not self.plan.data:
            return []
        # No text in the data can end the code block: no line of JSON begins with ```.
        return ["## Data", "", "```json", json.dumps(self.plan.data, indent=2), "```", ""]

    def _times(self) -> list[str]:
        plan = self.plan
        return [
            *([f"- {said(plan.note)}"] if plan.note else []),
            f"- scheduled for {plan.scheduled_at[:19].replace('T', ' ')} UTC, begun "
            f"{text_format.duration(plan.lateness_seconds)} later",
            f"- the challenger started {STARTS[self.start]}"
            if self.champion is not None or self.start == "scratch"
            else "- the challenger started from scratch: there was no champion",
        ]


def publish(facts: RetrainingFacts, journal: Journal, folder: Path) -> Path:
    """Write the report to the file, the storage and the artifact. Returns the file.

    A place that cannot be written is a warning, and neither fails the run nor skips the others.
    """
    text, path = facts.render(), folder / FILE
    name = f"retraining-{facts.model}"
    logger = get_run_logger()

    def write_file() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def write_artifact() -> None:
        MarkdownArtifact(name, f"Retraining of model {facts.model}").write(text)

    places: dict[str, Callable[[], None]] = {
        f"the file {path}": write_file,
        journal.url(REPORT): lambda: journal.write_report(text),
        f"the artifact {name}": write_artifact,
    }
    for place, write in places.items():
        try:
            write()
        except (OSError, StorageError, httpx.HTTPError, PrefectException) as error:
            logger.warning(
                "the report was not written to %s: %s: %s", place, type(error).__name__, error
            )
    return path


def trial_report_key(trial: str) -> str:
    """The key of the artifact with the trial's report."""
    return ReportArtifact(trial).key


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else said(str(value))


def _change(before: Any, after: Any) -> str:
    if not text_format.is_number(before) or not text_format.is_number(after):
        return ""
    return f"{after - before:+.6g}"
