"""Renders a trial's report: facts in, Markdown out. The text is in ``trial_report.md.j2``."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, NamedTuple

from trial_core.common.text_format import setting
from trial_core.messages import MetricsKind
from trial_core.observe.events.run_status import RunStatus
from trial_core.observe.ledger.time_ledger import TimeLedger
from trial_core.observe.report.curves import charts, figures
from trial_core.observe.report.history import ReportHistory, SavedCheckpoint
from trial_core.observe.report.markdown import template

BAR_CELLS = 30
SHOWN_METRICS = 24
SHOWN_FIGURES = 16
SHOWN_CHECKPOINTS = 15
SHOWN_RANKS = 64
WAIT_WORKLOADS = 20
# A rank that waits less than this share of its time is not reported.
MIN_WAITING_SHARE = 0.02
# A rank is not reported unless its forward pass takes this many times as long as the others'.
MIN_SLOWNESS = 1.2


class SlowestRank(NamedTuple):
    """The rank that waits longest for its data, and so delays the others: its share of the time,
    and the median share of the other ranks, if there are any."""

    rank: int
    share: float
    others_median: float | None


class SlowCompute(NamedTuple):
    """The rank that computes slowest: the times of its forward pass and of the others'."""

    rank: int
    milliseconds: float
    others_median: float


@dataclass
class TrialFacts:
    """The contents of a report."""

    name: str
    trial: str
    searcher_metric: str
    smaller_is_better: bool
    checkpoints_url: str
    locations: dict[str, str] = field(default_factory=dict)  # places: ``("Logs", "s3://…")``
    entrypoint: str = ""
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)  # by their paths
    topology: str = ""  # the ranks, and how they divide the work; empty until the trial is built
    versions: Mapping[str, str] = field(default_factory=dict)  # of the ranks' libraries
    code: str = ""  # the digest of the trial's code; empty if none is stored
    placed: str = ""  # the node of each rank, if they are on several nodes
    status: str = "running"  # or ``completed``, or how else the run ended
    is_over: bool = False
    run_status: RunStatus = field(default_factory=RunStatus)
    history: ReportHistory = field(default_factory=ReportHistory)
    # The last metrics of each kind, with their batch.
    last: dict[MetricsKind, tuple[int, Mapping[str, Any]]] = field(default_factory=dict)
    # Of the last train-workloads: seconds, and how many of them each rank waited for its data.
    waits: deque[tuple[float, Sequence[float]]] = field(
        default_factory=lambda: deque(maxlen=WAIT_WORKLOADS)
    )
    # Of a forward pass in the last train-workload, by rank; 0 if unknown.
    forward_seconds: Sequence[float] = ()
    # Reads the trial's ledger of time, whose last run is this one; None if it has none.
    ledger: Callable[[], TimeLedger] | None = None
    # How many records each tracker lacks after the run's end, for those that lack some.
    lacking: Mapping[str, int] = field(default_factory=dict)
    has_metric: bool = True  # the user has named the searcher metric, by which a checkpoint is best

    def render(self) -> str:
        """The report as Markdown, with curves as Mermaid charts, which Prefect's UI draws."""
        drawn = figures(self.history, self.searcher_metric)[:SHOWN_FIGURES]
        return self.markdown([line for figure in drawn for line in charts(figure)])

    def markdown(self, chart_lines: Sequence[str]) -> str:
        """The report as Markdown, with the given lines in place of its charts."""
        best = self.history.best(self.smaller_is_better) if self.has_metric else None
        listed = self._listed_checkpoints(best)
        checkpoints, status = self.history.checkpoints, self.run_status
        total, ledger = status.total_batches, None if self.ledger is None else self.ledger()
        stalls = [each.blocked_seconds for each in checkpoints if each.blocked_seconds is not None]
        return _TEMPLATE.render(
            facts=self,
            run_status=status,
            history=self.history,
            now=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S}",
            share=min(1.0, status.batches / total) if total else None,
            bar_cells=BAR_CELLS,
            time_left=None if self.is_over else status.seconds_left,
            slowest=slowest_rank(self.waits),
            slow_compute=slow_compute(self.forward_seconds),
            best=best,
            latest=checkpoints[-1] if checkpoints else None,
            ledger=ledger,
            stored=len(checkpoints) + self.history.unlisted + self.history.deleted,
            stall_seconds=statistics.median(stalls) if stalls else None,
            stall_share=None if ledger is None else ledger.stall_share,
            values=[f"{n} {setting(v)}" for n, v in self.hyperparameters.items()],
            shown_metrics=SHOWN_METRICS,
            shown_ranks=SHOWN_RANKS,
            chart_lines=chart_lines,
            listed=listed,
            unlisted=self.history.unlisted + len(checkpoints) - len(listed),
        )

    def _listed_checkpoints(self, best: SavedCheckpoint | None) -> list[SavedCheckpoint]:
        """The newest checkpoints, newest first, and the best one."""
        listed = self.history.checkpoints[-SHOWN_CHECKPOINTS:][::-1]
        if best is not None and not any(saved is best for saved in listed):
            listed.append(best)
        return listed


def slowest_rank(waits: Sequence[tuple[float, Sequence[float]]]) -> SlowestRank | None:
    """The rank that waits longest for its data; None if unknown or not worth a line."""
    # After a restart the number of ranks may differ: the last workload's counts.
    size = next((len(ranks) for _, ranks in reversed(waits) if ranks), 0)
    known = [(seconds, ranks) for seconds, ranks in waits if ranks and len(ranks) == size]
    total = sum(seconds for seconds, _ in known)
    if not total:
        return None
    by_rank = zip(*(ranks for _, ranks in known), strict=True)
    shares = [sum(waited) / total for waited in by_rank]
    share = max(shares)
    if share < MIN_WAITING_SHARE:
        return None
    rank = shares.index(share)
    others = shares[:rank] + shares[rank + 1 :]
    return SlowestRank(rank, share, statistics.median(others) if others else None)


def slow_compute(forward_seconds: Sequence[float]) -> SlowCompute | None:
    """The rank with the longest forward pass; None if unknown or hardly longer than others."""
    if len(forward_seconds) < 2 or not all(forward_seconds):
        return None
    longest = max(forward_seconds)
    rank = forward_seconds.index(longest)
    median = statistics.median([*forward_seconds[:rank], *forward_seconds[rank + 1 :]])
    if longest < MIN_SLOWNESS * median:
        return None
    return SlowCompute(rank, longest * 1000, median * 1000)


_TEMPLATE = template("trial_report.md.j2")
