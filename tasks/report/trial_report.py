"""Renders a trial's report: facts in, Markdown out. The text is in ``trial_report.md.j2``."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from trial_core import text_format
from trial_core.run.observer import MetricsKind
from trial_core.run.run_status import RunStatus
from trialflow.tasks.report.charts import chart
from trialflow.tasks.report.history import Curve, ReportHistory, SavedCheckpoint
from trialflow.tasks.report.markdown import escaped

BAR_CELLS = 30
SHOWN_METRICS = 24
SHOWN_CHARTS = 8  # of each kind
SHOWN_CHECKPOINTS = 15
WAIT_WORKLOADS = 20
# A rank that waits less than this share of its time is not reported.
MIN_WAITING_SHARE = 0.02

TITLES: Mapping[Curve, str] = {
    "training": "training: ", "validation": "validation: ", "speed": ""
}  # fmt: skip


class SlowestRank(NamedTuple):
    """The rank that waits longest for its data, and so delays the others.

    Attributes:
        share: of the training time that it waits.
        others_median: the median share of the other ranks; None if there are none.
    """

    rank: int
    share: float
    others_median: float | None


@dataclass
class TrialFacts:
    """The contents of a report.

    Attributes:
        name: the experiment's.
        checkpoints_url: the folder of all checkpoints.
        locations: what else belongs to the run, and where it is: ``("Logs", "s3://…")``.
        status: ``running``, ``completed``, or how else the run ended.
        last: the last metrics of each kind, with their batch.
        waits: of the last train-workloads: seconds, and how many of them each rank waited for its
            data.
    """

    name: str
    trial: str
    searcher_metric: str
    smaller_is_better: bool
    checkpoints_url: str
    locations: dict[str, str] = field(default_factory=dict)
    status: str = "running"
    is_over: bool = False
    run_status: RunStatus = field(default_factory=RunStatus)
    history: ReportHistory = field(default_factory=ReportHistory)
    last: dict[MetricsKind, tuple[int, Mapping[str, Any]]] = field(default_factory=dict)
    waits: deque[tuple[float, Sequence[float]]] = field(
        default_factory=lambda: deque(maxlen=WAIT_WORKLOADS)
    )

    def render(self) -> str:
        """The report as Markdown, with curves as Mermaid charts, which Prefect's UI draws."""
        best = self.history.best(self.smaller_is_better)
        listed = self._listed_checkpoints(best)
        checkpoints = self.history.checkpoints
        return _TEMPLATE.render(
            facts=self,
            run_status=self.run_status,
            history=self.history,
            now=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S}",
            progress_line=self._progress_line(),
            slowest=slowest_rank(self.waits),
            best=best,
            latest=checkpoints[-1] if checkpoints else None,
            shown_metrics=SHOWN_METRICS,
            chart_lines=self._chart_lines(),
            listed=listed,
            unlisted=self.history.unlisted + len(checkpoints) - len(listed),
        )

    def _progress_line(self) -> str:
        status = self.run_status
        share = min(1.0, status.batches / (status.total_batches or 1))
        filled = round(share * BAR_CELLS)
        parts = [f"`{'█' * filled}{'░' * (BAR_CELLS - filled)}` **{share:.0%}**"]
        if status.samples_per_second is not None:
            parts.append(text_format.speed(status.samples_per_second))
        if not self.is_over and status.seconds_left is not None:
            parts.append(f"{text_format.duration(status.seconds_left)} left")
        return " · ".join(parts)

    def _chart_lines(self) -> list[str]:
        lines: list[str] = []
        for kind, points in self.history.curves.items():
            names = {name: None for point in points for name in point.values}
            first = [name for name in ("loss", self.searcher_metric) if name in names]
            for name in list(dict.fromkeys([*first, *sorted(names)]))[:SHOWN_CHARTS]:
                curve = [(p.batches, p.values[name]) for p in points if name in p.values]
                if len(curve) > 1:
                    lines += chart(f"{TITLES[kind]}{name}", curve)
        return lines

    def _listed_checkpoints(self, best: SavedCheckpoint | None) -> list[SavedCheckpoint]:
        """The newest checkpoints, newest first, and the best one."""
        listed = self.history.checkpoints[-SHOWN_CHECKPOINTS:][::-1]
        if best is not None and not any(saved is best for saved in listed):
            listed.append(best)
        return listed


def slowest_rank(waits: Sequence[tuple[float, Sequence[float]]]) -> SlowestRank | None:
    """The rank that waits longest for its data; None if unknown or not worth a line."""
    known = [(seconds, ranks) for seconds, ranks in waits if ranks]
    total = sum(seconds for seconds, _ in known)
    if not total:
        return None
    # After a restart there may be another number of ranks: the last workload's counts.
    size = len(known[-1][1])
    by_rank = zip(*(ranks for _, ranks in known if len(ranks) == size), strict=True)
    shares = [sum(waited) / total for waited in by_rank]
    share = max(shares)
    if share < MIN_WAITING_SHARE:
        return None
    rank = shares.index(share)
    others = shares[:rank] + shares[rank + 1 :]
    return SlowestRank(rank, share, statistics.median(others) if others else None)


def _metric(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _template() -> Template:
    filters: dict[str, Callable[..., str]] = {
        "clean": lambda value: text_format.clean(str(value)),
        "duration": lambda seconds: "" if seconds is None else text_format.duration(seconds),
        "escaped": escaped,
        "metric": _metric,
        "number": text_format.number,
        "percent": "{:.0%}".format,
        "size": text_format.size,
    }
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= filters
    return environment.get_template("trial_report.md.j2")


_TEMPLATE = _template()
