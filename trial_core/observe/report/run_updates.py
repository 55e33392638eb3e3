"""The progress of a run for platforms: in a file, or sent to an endpoint."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from http.client import HTTPException
from pathlib import Path
from typing import Literal, cast

import msgspec

from trial_core.checkpoint.storage.local_files import replace_file
from trial_core.common import text_format
from trial_core.common.any_logger import AnyLogger
from trial_core.observe.events.run_status import RunStatus
from trial_core.schedule.ending import Ending
from trial_core.schedule.stop_requests import outcome_of

PROGRESS = "progress.json"
"""The file, in the trial's folder on this machine."""
FILE_VARIABLE = "TRIALFLOW_PROGRESS_FILE"
"""Names another place for the file."""

UPDATE_SECONDS = 5.0

ProgressStatus = Literal["running", "completed", "stopped", "failed"]


class RunUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a run.

    Attributes:
        why: the reason why it was stopped, completed early or has failed; else empty.
        percent: the share of trained batches; also 100 once the run has completed, unless early.
            None if unknown, as the length of a Core API script may be.
        total_batches: batches when training ends; None if unknown.
        seconds_left: an estimate from the run's speed so far, with all its stages; None if unknown.
        stage: the stage that it is in; empty once it has ended.
        metrics: the last metrics of each kind, ``training`` and ``validation``, if they are finite
            numbers.
        updated_at: ISO 8601, UTC.
    """

    trial: str
    experiment: str
    status: ProgressStatus
    why: str
    percent: float | None
    batches: int
    total_batches: int | None
    seconds_left: int | None
    stage: str
    metrics: dict[str, dict[str, float]]
    updated_at: str


@dataclass(frozen=True)
class Place:
    """A recipient of the progress, with its name for people. `tell` may take long, and may raise
    OSError, HTTPException or ValueError."""

    name: str
    tell: Callable[[RunUpdate], None]


def progress_file(run_dir: Path) -> Place:
    """The progress file: complete JSON at any time."""
    path = Path(os.environ.get(FILE_VARIABLE) or run_dir / PROGRESS)

    def write(progress: RunUpdate) -> None:
        data = msgspec.json.format(msgspec.json.encode(progress), indent=2)
        replace_file(path, data + b"\n")

    return Place(f"the progress file {path}", write)


class RunUpdates(RunStatus):
    """Reports the progress of a run to places: at its start, every 5 s, and at its end.

    A context manager. Each place has its own thread, so that none waits for another. A place that
    cannot be reached causes only a warning: it neither ends nor delays training.
    """

    def __init__(
        self,
        experiment: str,
        trial: str,
        places: Sequence[Place],
        ending: Ending,
        *,
        logger: AnyLogger,
    ) -> None:
        super().__init__()
        self._experiment, self._trial_id = experiment, trial
        self._ending, self._logger = ending, logger
        self._end = ""
        self._has_ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._keep_telling, args=(each,), name="progress", daemon=True)
            for each in places
        ]

    def run_ended(self, status: str, tensorboard_url: str | None = None) -> None:
        self._end = status
        self._has_ended.set()

    def progress(self) -> RunUpdate:
        status, why = outcome_of(self._end)
        has_completed = self._end == "completed"
        total, left = self.total_batches, None if self._end else self.seconds_left
        percent = min(1000, 1000 * self.batches // total) / 10 if total else None
        metrics = {"training": self.training, "validation": self.validation}
        return RunUpdate(
            trial=self._trial_id,
            experiment=self._experiment,
            status=cast(ProgressStatus, status or "running"),
            why=text_format.one_line(why),
            percent=100.0 if has_completed else percent,
            batches=self.batches,
            total_batches=total or None,
            seconds_left=0 if has_completed else None if left is None else math.ceil(left),
            stage="" if self._end else str(self.stage),
            metrics={
                kind: {name: v for name, v in each.items() if text_format.is_finite_number(v)}
                for kind, each in metrics.items()
            },
            updated_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )

    def __enter__(self) -> RunUpdates:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Wait until all places know how the run has ended."""
        self._has_ended.set()
        for each in self._threads:
            self._ending.join(each)

    def _keep_telling(self, place: Place) -> None:
        """Tell a place of the progress until the run ends, and once more then."""
        is_last = has_warned = False
        while not is_last:
            is_last = self._has_ended.is_set()
            try:
                place.tell(self.progress())
            except (OSError, HTTPException, ValueError) as error:
                if not has_warned:
                    self._logger.warning(
                        "%s is not up to date (logged once; training continues): %s: %s",
                        place.name, type(error).__name__, error,
                    )  # fmt: skip
                has_warned = True
            # Whatever happens meanwhile: `updated_at` also tells that the driver lives.
            self._has_ended.wait(UPDATE_SECONDS)
