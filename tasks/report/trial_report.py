"""What a trial's report says. Pure: facts in, Markdown out."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from trial_core import text_format
from trial_core.run.observer import MetricsKind
from trial_core.run.run_status import RunStatus
from trialflow.tasks.report.charts import chart
from trialflow.tasks.report.history import Curve, ReportHistory, SavedCheckpoint

BAR_CELLS = 30
SHOWN_METRICS = 24
SHOWN_CHARTS = 8  # of each kind
SHOWN_CHECKPOINTS = 15
SHOWN_CHARACTERS = 300
WAIT_WORKLOADS = 20
# Less than this share of its time is not worth a person's attention.
SHARE_WORTH_A_LINE = 0.02

TITLES: Mapping[Curve, str] = {
    "training": "training: ", "validation": "validation: ", "speed": ""
}  # fmt: skip


@dataclass
class TrialFacts:
    """What there is to report.

    Attributes:
        name: the experiment's.
        searcher_metric, smaller_is_better: what makes a checkpoint the best.
        places: what else belongs to the run, and where it is: ``("Logs", "s3://…")``.
        checkpoints_url: the folder of all checkpoints.
        status: ``running``, ``completed``, or how else it ended.
        last: the last metrics of each kind, with the batch that they are of.
        waits: of the last train-workloads: seconds, and how much of them each rank has waited for
            its data.
    """

    name: str
    trial: str
    searcher_metric: str
    smaller_is_better: bool
    checkpoints_url: str
    places: dict[str, str] = field(default_factory=dict)
    status: str = "running"
    is_over: bool = False
    progress: RunStatus = field(default_factory=RunStatus)
    story: ReportHistory = field(default_factory=ReportHistory)
    last: dict[MetricsKind, tuple[int, Mapping[str, Any]]] = field(default_factory=dict)
    waits: deque[tuple[float, Sequence[float]]] = field(
        default_factory=lambda: deque(maxlen=WAIT_WORKLOADS)
    )

    def render(self) -> str:
        """The report as Markdown; curves as Mermaid charts, which Prefect's UI draws."""
        total, now = self.progress.total_batches or "?", datetime.now(timezone.utc)
        lines = [
            f"# {said(self.name)}",
            "",
            f"**{said(self.status)}** · batch {self.progress.batches} of {total} · "
            f"trial `{self.trial}` · {now:%Y-%m-%d %H:%M:%S} UTC",
            "",
            *self._progress(),
            *self._slowest_rank(),
            *self._best_and_latest(),
            *self._metrics_table(),
            *self._curves(),
            *self._checkpoint_table(),
            *self._events(),
            *(f"- {what}: `{where}`" for what, where in self.places.items()),
            "",
        ]
        return "\n".join(lines)

    def _progress(self) -> list[str]:
        progress = self.progress
        if not progress.total_batches:
            return [] if self.is_over else [f"{text_format.clean(str(progress.stage))} …", ""]
        share = min(1.0, progress.batches / progress.total_batches)
        done = round(share * BAR_CELLS)
        facts = [f"`{'█' * done}{'░' * (BAR_CELLS - done)}` **{share:.0%}**"]
        if progress.samples_per_second is not None:
            facts.append(text_format.speed(progress.samples_per_second))
        if self.is_over:
            return [" · ".join(facts), ""]
        if progress.seconds_left is not None:
            facts.append(f"{text_format.duration(progress.seconds_left)} left")
        beside = "".join(f", beside it {upload}" for upload in progress.uploads)
        return [" · ".join(facts), "", f"now: {text_format.clean(str(progress.stage))}{beside}", ""]

    def _slowest_rank(self) -> list[str]:
        """Which rank the others wait for, as far as it is known: the one that waits for data."""
        shares = waiting_shares(self.waits)
        if not shares or max(shares) < SHARE_WORTH_A_LINE:
            return []
        most = max(shares)
        slowest = shares.index(most)
        others = shares[:slowest] + shares[slowest + 1 :]
        rest = f", the others {statistics.median(others):.0%} (median)" if others else ""
        return [
            f"slowest rank: {slowest}, which waits for its data {most:.0%} of the time{rest}",
            "",
        ]

    def _best_and_latest(self) -> list[str]:
        checkpoints, best = self.story.checkpoints, self.story.best(self.smaller_is_better)
        facts = []
        if best is not None:
            name, value = said(self.searcher_metric), text_format.number(best.metric)
            facts.append(f"best: {name} {value} at batch {best.batches}, checkpoint `{best.uuid}`")
        if checkpoints and checkpoints[-1] is not best:
            latest = checkpoints[-1]
            facts.append(f"latest: batch {latest.batches}, checkpoint `{latest.uuid}`")
        return [*(f"- {fact}" for fact in facts), ""] if facts else []

    def _metrics_table(self) -> list[str]:
        rows = []
        for kind, (batches, metrics) in self.last.items():
            values = sorted(metrics.items())
            for name, value in values[:SHOWN_METRICS]:
                shown = f"{value:.6g}" if isinstance(value, float) else str(value)
                rows.append(f"| {kind} | {batches} | {said(name)} | {said(shown)} |")
            if more := len(values) - SHOWN_METRICS:
                rows += [f"| {kind} | {batches} | … {more} more | |"] if more > 0 else []
        if not rows:
            return []
        return ["| | batch | metric | value |", "|---|---:|---|---:|", *rows, ""]

    def _curves(self) -> list[str]:
        lines: list[str] = []
        for kind, points in self.story.curves.items():
            names = {name: None for point in points for name in point.values}
            first = [name for name in ("loss", self.searcher_metric) if name in names]
            for name in list(dict.fromkeys([*first, *sorted(names)]))[:SHOWN_CHARTS]:
                curve = [(p.batches, p.values[name]) for p in points if name in p.values]
                if len(curve) > 1:
                    lines += chart(f"{TITLES[kind]}{name}", curve)
        return lines

    def _checkpoint_table(self) -> list[str]:
        story = self.story
        if not story.checkpoints and not story.deleted:
            return []
        best = story.best(self.smaller_is_better)
        listed = story.checkpoints[-SHOWN_CHECKPOINTS:]
        rows = [self._checkpoint_row(saved, saved is best) for saved in reversed(listed)]
        if best is not None and not any(saved is best for saved in listed):
            rows.append(self._checkpoint_row(best, is_best=True))
        counts = [
            (story.unlisted + len(story.checkpoints) - len(rows), "not listed here"),
            (story.deleted, "deleted, since the experiment's rules did not keep them"),
        ]
        more = [f"{count} more {what}" for count, what in counts if count > 0]
        metric = said(self.searcher_metric)
        return [
            "## Checkpoints",
            "",
            f"in `{self.checkpoints_url}`",
            "",
            f"| batch | checkpoint | size | training waited | upload | {metric} |",
            "|---:|---|---:|---:|---:|---:|",
            *rows,
            "",
            *(["; ".join(more), ""] if more else []),
        ]

    def _checkpoint_row(self, saved: SavedCheckpoint, is_best: bool) -> str:
        metric = "" if saved.metric is None else f"{saved.metric:.6g}"
        cells = [
            str(saved.batches),
            f"`{saved.uuid}`",
            text_format.size(saved.total_bytes),
            _seconds(saved.blocked_seconds),
            _seconds(saved.upload_seconds),
            f"**{metric}** (best)" if is_best else metric,
        ]
        return f"| {' | '.join(cells)} |"

    def _events(self) -> list[str]:
        story = self.story
        if not story.events:
            return []
        rows = [
            f"| {event.at[:19].replace('T', ' ')} | {event.batches} | {said(event.what)} |"
            for event in story.events
        ]
        if story.forgotten_events:
            rows.insert(0, f"| | | … {story.forgotten_events} before |")
        return ["## Restarts", "", "| UTC | batch | what |", "|---|---:|---|", *rows, ""]


def waiting_shares(waits: Sequence[tuple[float, Sequence[float]]]) -> list[float]:
    """For which share of the time each rank has waited for its data; empty if that is unknown."""
    known = [(seconds, ranks) for seconds, ranks in waits if ranks]
    total = sum(seconds for seconds, _ in known)
    if not total:
        return []
    # A group that was launched again may have another number of ranks: the last one counts.
    size = len(known[-1][1])
    alike = [ranks for _, ranks in known if len(ranks) == size]
    return [sum(each) / total for each in zip(*alike, strict=True)]


def said(text: str) -> str:
    """Somebody else's words on one line, as Markdown that shows them as they are."""
    line = text_format.one_line(text)
    if len(line) > SHOWN_CHARACTERS:
        line = line[:SHOWN_CHARACTERS] + "…"
    for special in ("\\", "|", "*", "`", "["):
        line = line.replace(special, f"\\{special}")
    return line.replace("<", "&lt;")


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else text_format.duration(seconds)
