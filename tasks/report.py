"""The live report of a trial: one Markdown artifact on the run's page, and the same as a file.

It sits between a run and its observer: it hears what the observer hears, and passes it on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.logging import get_run_logger

from trial_core.config import ExperimentConfig
from trial_core.observer import MetricsKind, Observer

UPDATE_SECONDS = 5.0
MAX_POINTS = 60


class Report(Observer):
    """Keeps a trial's report up to date, and passes everything on to `observer`.

    Attributes:
        path: the report as a file.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        trial: str,
        run_dir: Path,
        flow_run_id: str,
        observer: Observer,
    ) -> None:
        self.path = run_dir / "report.md"
        self._config = config
        self._trial = trial
        self._run_dir = run_dir
        self._flow_run_id = flow_run_id
        self._observer = observer
        self._logger = get_run_logger()
        self._artifact: UUID | None = None
        self._updated_at = 0.0
        self._status = "running"
        self._batches = 0
        self._total: int | None = None
        self._points: dict[MetricsKind, list[tuple[int, Mapping[str, Any]]]] = {
            "training": [],
            "validation": [],
        }
        self._checkpoints: list[tuple[str, int, int]] = []
        self._restarts: list[str] = []

    # ------------------------------------------------------------------ what a run tells it

    def run_started(
        self, trial: str, total_batches: int, begins_at: int, batch_samples: int
    ) -> None:
        self._total, self._batches = total_batches, begins_at
        self._observer.run_started(trial, total_batches, begins_at, batch_samples)
        self.update()

    def stage_started(self, stage: str, detail: str) -> None:
        self._observer.stage_started(stage, detail)

    def stage_ended(self, stage: str, detail: str, seconds: float) -> None:
        self._observer.stage_ended(stage, detail, seconds)

    def batches_trained(self, batches: int) -> None:
        self._batches = max(self._batches, batches)
        self._observer.batches_trained(batches)

    def metrics_reported(self, kind: MetricsKind, batches: int, metrics: Mapping[str, Any]) -> None:
        self._points[kind].append((batches, metrics))
        self._batches = max(self._batches, batches)
        self._observer.metrics_reported(kind, batches, metrics)
        self.update()

    def checkpoint_committed(self, uuid: str, batches: int, total_bytes: int) -> None:
        self._checkpoints.append((uuid, batches, total_bytes))
        self._observer.checkpoint_committed(uuid, batches, total_bytes)

    def rank_logged(self, rank: int, line: str) -> None:
        self._logger.info("[rank %d] %s", rank, line)
        self._observer.rank_logged(rank, line)

    def restarting(self, reason: str, attempt: int, max_restarts: int) -> None:
        self._restarts.append(reason)
        self._observer.restarting(reason, attempt, max_restarts)
        self.update(force=True)

    def finish(self, status: str, reason: str = "") -> None:
        """The run has ended: write the last state of the report."""
        self._status = f"{status}: {reason}" if reason else status
        self.update(force=True)

    # -------------------------------------------------------------------------- the report

    def update(self, force: bool = False) -> None:
        """Write the report, unless that was done a moment ago. Called in the flow's thread."""
        if not force and time.monotonic() - self._updated_at < UPDATE_SECONDS:
            return
        text = self.render()
        self.path.write_text(text)
        if self._artifact is None:
            key = f"trial-{self._trial}".replace("_", "-").lower()
            created = create_markdown_artifact(text, key=key, description=f"Trial {self._trial}")
            self._artifact = created if isinstance(created, UUID) else None
        else:
            with get_client(sync_client=True) as client:
                client.update_artifact(self._artifact, ArtifactUpdate(data=text))
        self._updated_at = time.monotonic()

    def render(self) -> str:
        """The report as Markdown; curves as Mermaid charts, which Prefect's UI draws."""
        total = self._total if self._total is not None else "?"
        lines = [
            f"# {self._config.name}",
            "",
            f"**{self._status}** · batch {self._batches} of {total} · trial `{self._trial}` · "
            f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} UTC",
            "",
            *self._metrics_table(),
            *self._curves(),
            *self._checkpoint_table(),
        ]
        if self._restarts:
            lines += ["## Restarts", "", *(f"1. {reason}" for reason in self._restarts), ""]
        lines += [f"Logs: `{self._run_dir / 'logs'}`", ""]
        return "\n".join(lines)

    def _metrics_table(self) -> list[str]:
        rows = [
            f"| {kind} | {points[-1][0]} | {name} | {_shown(value)} |"
            for kind, points in self._points.items()
            if points
            for name, value in sorted(points[-1][1].items())
        ]
        if not rows:
            return []
        return ["| | batch | metric | value |", "|---|---:|---|---:|", *rows, ""]

    def _curves(self) -> list[str]:
        lines: list[str] = []
        for kind, points in self._points.items():
            names = sorted({name for _, metrics in points for name in metrics})
            for name in names:
                curve = [(b, m[name]) for b, m in points if isinstance(m.get(name), (int, float))]
                if len(curve) > 1:
                    lines += _chart(f"{kind}: {name}", curve)
        return lines

    def _checkpoint_table(self) -> list[str]:
        if not self._checkpoints:
            return []
        rows = [f"| `{u}` | {b} | {size / 2**20:.1f} MiB |" for u, b, size in self._checkpoints]
        return ["## Checkpoints", "", "| uuid | batch | size |", "|---|---:|---:|", *rows, ""]


def _chart(title: str, curve: list[tuple[int, float]]) -> list[str]:
    step = -(-len(curve) // MAX_POINTS)
    shown = curve[::step] if (len(curve) - 1) % step == 0 else [*curve[::step], curve[-1]]
    finite = [(b, v) for b, v in shown if v == v and abs(v) != float("inf")]
    if len(finite) < 2:
        return []
    return [
        "```mermaid",
        "xychart-beta",
        f'  title "{title}"',
        f"  x-axis [{', '.join(str(b) for b, _ in finite)}]",
        f"  line [{', '.join(f'{v:.6g}' for _, v in finite)}]",
        "```",
        "",
    ]


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
