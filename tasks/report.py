"""The live report of a trial: one Markdown artifact on the run's page, and the same as a file.

It sits between a run and its observer: it hears what the observer hears, and passes it on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any
from uuid import UUID

import httpx
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.exceptions import PrefectException
from prefect.logging import get_run_logger

from tasks.report_text import ReportText, SavedCheckpoint
from trial_core.config import ExperimentConfig
from trial_core.observer import MetricsKind, Observer

UPDATE_SECONDS = 5.0


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
        observer: Observer,
    ) -> None:
        self.path = run_dir / "report.md"
        self._text = ReportText(config.name, trial, run_dir / "logs")
        self._observer = observer
        self._logger = get_run_logger()
        self._artifact: UUID | None = None
        self._updated_at = 0.0
        self._has_warned = False

    # ------------------------------------------------------------------ what a run tells it

    def run_started(
        self, trial: str, total_batches: int, begins_at: int, batch_samples: int
    ) -> None:
        self._text.total_batches, self._text.batches = total_batches, begins_at
        self._observer.run_started(trial, total_batches, begins_at, batch_samples)
        self.update()

    def stage_started(self, stage: str, detail: str) -> None:
        self._observer.stage_started(stage, detail)

    def stage_ended(self, stage: str, detail: str, seconds: float) -> None:
        self._observer.stage_ended(stage, detail, seconds)

    def batches_trained(self, batches: int) -> None:
        self._text.batches = max(self._text.batches, batches)
        self._observer.batches_trained(batches)

    def metrics_reported(self, kind: MetricsKind, batches: int, metrics: Mapping[str, Any]) -> None:
        self._text.points[kind].append((batches, metrics))
        self._text.batches = max(self._text.batches, batches)
        self._observer.metrics_reported(kind, batches, metrics)
        self.update()

    def checkpoint_committed(self, uuid: str, batches: int, total_bytes: int) -> None:
        self._text.checkpoints.append(SavedCheckpoint(uuid, batches, total_bytes))
        self._observer.checkpoint_committed(uuid, batches, total_bytes)

    def rank_logged(self, rank: int, line: str) -> None:
        self._logger.info("[rank %d] %s", rank, line)
        self._observer.rank_logged(rank, line)

    def restarting(self, reason: str, attempt: int, max_restarts: int) -> None:
        self._text.restarts.append(reason)
        self._observer.restarting(reason, attempt, max_restarts)
        self.update(force=True)

    def ended(self, status: str, tensorboard_url: str | None = None) -> None:
        """The run has ended, well; its files for TensorBoard, if there are any, are there."""
        self._text.status, self._text.tensorboard_url = status, tensorboard_url

    def __enter__(self) -> Report:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Write the report's last state, whatever the end was."""
        if error is not None:
            reason = str(error) or type(error).__name__
            self._text.status = (
                f"{'failed' if isinstance(error, Exception) else 'stopped'}: {reason}"
            )
        self.update(force=True)

    def update(self, force: bool = False) -> None:
        """Write the report, unless that was done a moment ago. Called in the flow's thread.

        A report that cannot be written is no reason to end training, nor to hide why it ended.
        """
        if not force and time.monotonic() - self._updated_at < UPDATE_SECONDS:
            return
        text = self._text.render()
        self._try(self._write_file, text)
        self._try(self._write_artifact, text)
        self._updated_at = time.monotonic()

    def _try(self, write: Callable[[str], None], text: str) -> None:
        try:
            write(text)
        except (OSError, httpx.HTTPError, PrefectException) as error:
            if not self._has_warned:
                self._logger.warning(
                    "the report is not up to date (said once, training goes on): %s: %s",
                    type(error).__name__,
                    error,
                )
            self._has_warned = True

    def _write_file(self, text: str) -> None:
        # Whoever reads it meanwhile sees the last state, whole.
        temporary = self.path.with_name(f".{self.path.name}.part")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, self.path)

    def _write_artifact(self, text: str) -> None:
        if self._artifact is None:
            key = f"trial-{self._text.trial}"
            created = create_markdown_artifact(
                text, key=key, description=f"Trial {self._text.trial}"
            )
            self._artifact = created if isinstance(created, UUID) else None
        else:
            with get_client(sync_client=True) as client:
                client.update_artifact(self._artifact, ArtifactUpdate(data=text))
