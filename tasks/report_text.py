"""What a trial's report says. Pure: facts in, Markdown out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from trial_core.observer import MetricsKind

MAX_POINTS = 60
# Mermaid's own first colour is nearly white, as is the page.
CHART_COLOURS = '%%{init: {"themeVariables": {"xyChart": {"plotColorPalette": "#2563eb"}}}}%%'


@dataclass(frozen=True)
class SavedCheckpoint:
    """A committed checkpoint, as the report lists it."""

    uuid: str
    batches: int
    total_bytes: int


@dataclass
class ReportText:
    """The facts of a report.

    Attributes:
        status: ``running``, ``completed``, or how else it ended.
        batches: batches trained so far; `total_batches` is where training ends, once known.
        points: metrics by kind: (batches trained, metric values) in the order of reporting.
        checkpoints: those committed by this run.
        restarts: why the slot group had to be launched again, each time.
        tensorboard_url: where the trial's files for TensorBoard are, if it writes any.
    """

    name: str
    trial: str
    log_dir: Path
    status: str = "running"
    batches: int = 0
    total_batches: int | None = None
    points: dict[MetricsKind, list[tuple[int, Mapping[str, Any]]]] = field(
        default_factory=lambda: {"training": [], "validation": []}
    )
    checkpoints: list[SavedCheckpoint] = field(default_factory=list)
    restarts: list[str] = field(default_factory=list)
    tensorboard_url: str | None = None

    def render(self) -> str:
        """The report as Markdown; curves as Mermaid charts, which Prefect's UI draws."""
        total = "?" if self.total_batches is None else self.total_batches
        now = datetime.now(timezone.utc)
        lines = [
            f"# {self.name}",
            "",
            f"**{self.status}** · batch {self.batches} of {total} · trial `{self.trial}` · "
            f"{now:%Y-%m-%d %H:%M:%S} UTC",
            "",
            *self._metrics_table(),
            *self._curves(),
            *self._checkpoint_table(),
            *self._restart_list(),
            *([f"TensorBoard: `{self.tensorboard_url}`", ""] if self.tensorboard_url else []),
            f"Logs: `{self.log_dir}`",
            "",
        ]
        return "\n".join(lines)

    def _metrics_table(self) -> list[str]:
        rows = [
            f"| {kind} | {points[-1][0]} | {name} | {_shown(value)} |"
            for kind, points in self.points.items()
            if points
            for name, value in sorted(points[-1][1].items())
        ]
        if not rows:
            return []
        return ["| | batch | metric | value |", "|---|---:|---|---:|", *rows, ""]

    def _curves(self) -> list[str]:
        lines: list[str] = []
        for kind, points in self.points.items():
            for name in sorted({name for _, metrics in points for name in metrics}):
                curve = [(b, m[name]) for b, m in points if _is_drawable(m.get(name))]
                if len(curve) > 1:
                    lines += _chart(f"{kind}: {name}", curve)
        return lines

    def _checkpoint_table(self) -> list[str]:
        if not self.checkpoints:
            return []
        rows = [
            f"| `{saved.uuid}` | {saved.batches} | {saved.total_bytes / 2**20:.1f} MiB |"
            for saved in self.checkpoints
        ]
        return ["## Checkpoints", "", "| uuid | batch | size |", "|---|---:|---:|", *rows, ""]

    def _restart_list(self) -> list[str]:
        if not self.restarts:
            return []
        return ["## Restarts", "", *(f"1. {reason}" for reason in self.restarts), ""]


def _chart(title: str, curve: list[tuple[int, float]]) -> list[str]:
    step = -(-len(curve) // MAX_POINTS)
    shown = curve[::step]
    if shown[-1] != curve[-1]:
        shown.append(curve[-1])
    return [
        "```mermaid",
        CHART_COLOURS,
        "xychart-beta",
        f'  title "{title}"',
        f"  x-axis [{', '.join(str(batches) for batches, _ in shown)}]",
        f"  line [{', '.join(f'{value:.6g}' for _, value in shown)}]",
        "```",
        "",
    ]


def _is_drawable(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
