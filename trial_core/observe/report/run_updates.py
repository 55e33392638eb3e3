"""The progress of a run for platforms: in a file, or sent to an endpoint."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from http.client import HTTPException
from logging import Logger, LoggerAdapter
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from trial_core.checkpoint.storage.local_files import replace_file
from trial_core.common import text_format
from trial_core.observe.events.run_status import RunStatus
from trial_core.schedule.ending import Ending

PROGRESS = "progress.json"
"""The file, in the trial's folder on this machine."""
FILE_VARIABLE = "TRIALFLOW_PROGRESS_FILE"
"""Names another place for the file."""

UPDATE_SECONDS = 5.0

ProgressStatus = Literal["running", "completed", "stopped", "failed"]


class RunUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a run.

    Attributes:
        why: the reason why it was stopped or has failed; else empty.
        percent: the share of trained batches; also 100 once the run has completed. None if unknown,
            as the length of a Core API script may be.
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
    """A recipient of the progress.

    Attributes:
        name: for people: "its file".
        tell: sends it; may take long, and may raise OSError, HTTPException or ValueError.
    """

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

    Args:
        ending: limits the wait for the last update of a place.
        logger: gets the warnings.
    """

    def __init__(
        self,
        experiment: str,
        trial: str,
        places: Sequence[Place],
        ending: Ending,
        *,
        logger: Logger | LoggerAdapter[Any],
    ) -> None:
        super().__init__()
        self._experiment, self._trial_id = experiment, trial
        self._ending = ending
        self._end = ""
        self._updates = [_Updates(place, self.progress, logger) for place in places]

    def run_ended(self, status: str, tensorboard_url: str | None = None) -> None:
        self._end = status
        for each in self._updates:
            each.end()

    def progress(self) -> RunUpdate:
        """The present progress."""
        status, _, why = self._end.partition(": ")
        has_completed = status == "completed"
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
            metrics={kind: _finite_numbers(each) for kind, each in metrics.items()},
            updated_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )

    def __enter__(self) -> RunUpdates:
        for each in self._updates:
            each.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Wait until all places know how the run has ended."""
        for each in self._updates:
            each.end()
        for each in self._updates:
            self._ending.join(each)


class _Updates(threading.Thread):
    """Reports the progress to one place until the run ends, and once more then."""

    def __init__(
        self,
        place: Place,
        progress: Callable[[], RunUpdate],
        logger: Logger | LoggerAdapter[Any],
    ) -> None:
        super().__init__(name="progress", daemon=True)
        self._place = place
        self._progress = progress
        self._logger = logger
        self._has_ended = threading.Event()
        self._has_warned = False

    def end(self) -> None:
        """Report at once that the run has ended, and end."""
        self._has_ended.set()

    def run(self) -> None:
        """Run the thread."""
        while not self._has_ended.is_set():
            self._tell()
            # It does not wait for an event: `updated_at` also tells that the driver lives.
            self._has_ended.wait(UPDATE_SECONDS)
        self._tell()

    def _tell(self) -> None:
        try:
            self._place.tell(self._progress())
        except (OSError, HTTPException, ValueError) as error:
            if not self._has_warned:
                self._logger.warning(
                    "%s is not up to date (logged once; training continues): %s: %s",
                    self._place.name, type(error).__name__, error,
                )  # fmt: skip
            self._has_warned = True


def _finite_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: each for name, each in metrics.items() if text_format.is_finite_number(each)}
