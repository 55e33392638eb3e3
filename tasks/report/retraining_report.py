"""What a retraining's report says: champion and challenger beside each other. Pure, but for
`publish`."""

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
from trial_core.models.comparison import PromotionRule
from trial_core.models.journal import (
    REPORT,
    Challenger,
    Champion,
    Journal,
    PromotionDecision,
    RetrainingPlan,
)
from trial_core.models.records import Version
from trialflow.tasks.report.artifact import MarkdownArtifact, ReportArtifact
from trialflow.tasks.report.markdown import escaped as said

FILE = "retraining.md"
STARTS: Mapping[str, str] = {
    "scratch": "with nothing of the champion",
    "warm": "with the champion's weights",
    "continue": "with the champion's weights, optimizer, schedules and callbacks",
}


@dataclass
class RetrainingFacts:
    """What there is to report, as far as the run has come.

    Attributes:
        start: what the challenger starts from.
        rule: what is better.
        plan: what the run does.
        champion: the version that the challenger is compared with; None: there is none.
        champion_found: how that does on the run's data.
        challenger: what was trained.
        outcome: what became of it.
        ended: how the run has ended, if it came to no outcome.
        failed_callbacks: what went wrong, by callback.
        places: what else belongs to the run, and where it is.
    """

    model: str
    start: str
    rule: PromotionRule
    plan: RetrainingPlan
    champion: Version | None = None
    champion_found: Champion | None = None
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
        """How it ended, in a few words."""
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
            lines += [f"The run ended otherwise: {said(self.ended)}", ""]
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
        """All metrics of both, on the same data, and how they differ."""
        old = self.champion_found.metrics if self.champion_found else {}
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
        # No text of others can end the block: JSON has no line of its own that begins with it.
        return ["## Data", "", "```json", json.dumps(self.plan.data, indent=2), "```", ""]

    def _times(self) -> list[str]:
        plan = self.plan
        return [
            *([f"- {said(plan.note)}"] if plan.note else []),
            f"- scheduled for {plan.scheduled_at[:19].replace('T', ' ')} UTC, begun "
            f"{text_format.duration(plan.lateness_seconds)} later",
            f"- the challenger started {STARTS[self.start]}"
            if self.champion is not None or self.start == "scratch"
            else "- the challenger started with nothing: there was no champion",
        ]


def publish(facts: RetrainingFacts, notes: Journal, folder: Path) -> Path:
    """Write the report: the file, the one in the storage, the artifact. One that cannot be written
    is a warning: no reason to end a run, nor to hide why it ended, nor to leave out the others."""
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
        notes.url(REPORT): lambda: notes.write_report(text),
        f"the artifact {name}": write_artifact,
    }
    for place, write in places.items():
        try:
            write()
        except (OSError, StorageError, httpx.HTTPError, PrefectException) as error:
            logger.warning("%s is not up to date: %s: %s", place, type(error).__name__, error)
    return path


def report_of(trial: str) -> str:
    """The key of the artifact that is a trial's own report."""
    return ReportArtifact(trial).key


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else said(str(value))


def _change(before: Any, after: Any) -> str:
    if not text_format.is_number(before) or not text_format.is_number(after):
        return ""
    return f"{after - before:+.6g}"
