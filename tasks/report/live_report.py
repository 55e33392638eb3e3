"""The report while its run goes on: hears what the observer hears, and passes it on."""

from __future__ import annotations

import contextvars
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import msgspec
from prefect.exceptions import PrefectException
from prefect.logging import get_run_logger

from trial_core import text_format
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.errors import Stopped, TrialflowError
from trial_core.run.observer import MetricsKind, Observer
from trial_core.run.run_status import UPLOAD
from trial_core.run.stop_request import StopHandler
from trial_core.slots.log_pump import WARNING_PATTERN
from trialflow.tasks.rank_logs import LogCaps, StoredLogs
from trialflow.tasks.report.artifact import ReportArtifact
from trialflow.tasks.report.history import ReportHistory, SavedCheckpoint
from trialflow.tasks.report.trial_report import TrialFacts

UPDATE_SECONDS = 5.0
# For an update that is under way when the run ends; Prefect's client gives up by itself.
JOIN_SECONDS = 30.0
REPORT, STORY = "report.md", "report.json"
WITHOUT_A_WORD = "it ended without a word (killed, or its machine was lost)"
# Of validations and saves whose checkpoint is yet to be committed.
REMEMBERED = 32


class Report(Observer):
    """Keeps a trial's report up to date, and passes everything on to `observer`.

    A context manager: within its block a thread of its own writes the report when something has
    changed, at most every 5 s, and brings it and the ranks' logs to the storage after a commit.
    A report that cannot be written is no reason to end training, nor to hide why it ended.

    Args:
        run_dir: the trial's folder on this machine.
        store: where the trial's checkpoints are; by default what the experiment names.
        stopping: whether the run has been asked to stop.

    Attributes:
        path: the report as a file.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        trial: str,
        run_dir: Path,
        observer: Observer,
        store: CheckpointStore | None = None,
        stopping: StopHandler | None = None,
    ) -> None:
        place = config.checkpoint_storage
        store = store or CheckpointStore(place.url, place.options)
        self.path = run_dir / REPORT
        self._story_path = run_dir / STORY
        self._observer = observer
        self._stopping = stopping
        self._logger = get_run_logger()
        self._logs = StoredLogs(store, trial, run_dir, (REPORT, STORY))
        self._facts = TrialFacts(
            config.name, trial, config.searcher.metric, config.searcher.smaller_is_better,
            store.files_url("").rstrip("/"), self._logs.places(),
        )  # fmt: skip
        self._artifact = ReportArtifact(trial)
        self._log_caps = LogCaps()
        self._metric_at: dict[int, float] = {}
        self._blocked: dict[str, float] = {}
        self._warned: set[str] = set()
        earlier = self._earlier_story()
        # How the last run has ended; None for the first one, empty once this one has begun.
        self._before: str | None = None
        if earlier is not None:
            self._before = earlier.ended or WITHOUT_A_WORD
            earlier.ended = ""
            self._facts.story = earlier
        self._lock = threading.RLock()
        self._has_changed = threading.Event()
        self._is_over = threading.Event()
        self._logs_are_due = False
        # The flow run, and Prefect's settings, are those of this context.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=lambda: context.run(self._keep_writing), name="report", daemon=True
        )

    # ------------------------------------------------------------------ what a run tells it

    def run_started(
        self, trial: str, total_batches: int, begins_at: int, batch_samples: int
    ) -> None:
        with self._changing() as facts:
            facts.story.go_back_to(begins_at)
            if self._before is not None or begins_at:
                what = "went on from the last checkpoint" if begins_at else "began with nothing"
                before = f"; before: {self._before}" if self._before else ""
                facts.story.add_event(begins_at, f"{what}{before}")
            self._before = ""
            facts.progress.run_started(trial, total_batches, begins_at, batch_samples)
        self._observer.run_started(trial, total_batches, begins_at, batch_samples)

    def stage_started(self, stage: str, detail: str) -> None:
        with self._changing() as facts:
            facts.progress.stage_started(stage, detail)
        self._observer.stage_started(stage, detail)

    def stage_ended(self, stage: str, detail: str, seconds: float) -> None:
        with self._changing() as facts:
            facts.progress.stage_ended(stage, detail, seconds)
            if stage == "checkpoint-save":
                _remember(self._blocked, detail, seconds)
        self._observer.stage_ended(stage, detail, seconds)

    def batches_trained(self, batches: int) -> None:
        with self._changing() as facts:
            facts.progress.batches_trained(batches)
        self._observer.batches_trained(batches)

    def training_timed(
        self, begin: int, reached: int, seconds: float, data_seconds: Sequence[float]
    ) -> None:
        with self._changing() as facts:
            facts.waits.append((seconds, tuple(data_seconds)))
            samples = (reached - begin) * facts.progress.batch_samples
            if seconds > 0 and samples:
                facts.story.add_point("speed", reached, {"samples/s": samples / seconds})
        self._observer.training_timed(begin, reached, seconds, data_seconds)

    def metrics_reported(self, kind: MetricsKind, batches: int, metrics: Mapping[str, Any]) -> None:
        with self._changing() as facts:
            facts.progress.metrics_reported(kind, batches, metrics)
            facts.last[kind] = (batches, metrics)
            facts.story.add_point(kind, batches, metrics)
            metric = metrics.get(facts.searcher_metric)
            if kind == "validation" and text_format.is_number(metric) and math.isfinite(metric):
                _remember(self._metric_at, batches, float(metric))
        self._observer.metrics_reported(kind, batches, metrics)

    def checkpoint_committed(self, uuid: str, batches: int, total_bytes: int) -> None:
        with self._changing() as facts:
            upload = facts.progress.running(UPLOAD, f"@{batches}")
            saved = SavedCheckpoint(
                uuid=uuid,
                batches=batches,
                total_bytes=total_bytes,
                metric=self._metric_at.get(batches),
                blocked_seconds=self._blocked.pop(f"@{batches}", None),
                upload_seconds=None if upload is None else facts.progress.seconds_in(upload),
            )
            facts.progress.checkpoint_committed(uuid, batches, total_bytes)
            facts.story.add_checkpoint(saved, facts.smaller_is_better)
            self._logs_are_due = True
        self._observer.checkpoint_committed(uuid, batches, total_bytes)

    def checkpoint_deleted(self, uuid: str) -> None:
        with self._changing() as facts:
            facts.story.drop_checkpoint(uuid)
        self._observer.checkpoint_deleted(uuid)

    def rank_logged(self, rank: int, line: str) -> None:
        is_alarming = WARNING_PATTERN.search(line) is not None
        if self._log_caps.admits(rank, is_alarming):
            self._say_what_was_left_out()
            log = self._logger.warning if is_alarming else self._logger.info
            log("[rank %d] %s", rank, line)
        self._observer.rank_logged(rank, line)

    def stopping(self, why: str) -> None:
        self._observer.stopping(why)

    def restarting(self, reason: str, attempt: int, max_restarts: int) -> None:
        with self._changing() as facts:
            batches = facts.progress.batches
            what = f"restart {attempt} of at most {max_restarts}: {text_format.one_line(reason)}"
            facts.story.add_event(batches, what)
            facts.progress.restarting(reason, attempt, max_restarts)
        self._observer.restarting(reason, attempt, max_restarts)

    def ended(self, status: str, tensorboard_url: str | None = None) -> None:
        """The run has ended, well; its files for TensorBoard, if there are any, are there."""
        with self._changing() as facts:
            facts.status, facts.is_over = status, True
            facts.story.ended = status
            if tensorboard_url:
                facts.places = {"TensorBoard": tensorboard_url, **facts.places}

    # ------------------------------------------------------------------------------ writing

    def __enter__(self) -> Report:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Write the report's last state, whatever the end was, and store it with the logs."""
        if error is not None:
            is_stop = isinstance(error, Stopped) or not isinstance(error, Exception)
            reason = str(error) or type(error).__name__
            self.ended(f"{'stopped' if is_stop else 'failed'}: {reason}")
        self._is_over.set()
        self._has_changed.set()
        self._logs.hurry()
        self._thread.join(JOIN_SECONDS)
        self._say_what_was_left_out()
        self.write()
        is_in_a_hurry = error is not None or self._asked_to_stop is not None
        self._try("stored", lambda: self._logs.store_last(is_in_a_hurry))

    def write(self) -> None:
        """Write the report as of now: the file, what the next run needs, and the artifact."""
        with self._lock:
            if not self._facts.is_over and (asked := self._asked_to_stop):
                self._facts.status = f"stopping: {asked}"
            text, story = self._facts.render(), self._facts.story.to_json()
        self._try("up to date", lambda: _replace(self.path, text.encode()))
        self._try("up to date", lambda: _replace(self._story_path, story))
        self._try("up to date", lambda: self._artifact.write(text))

    def _keep_writing(self) -> None:
        while not self._is_over.is_set():
            self._has_changed.wait()
            self._has_changed.clear()
            if self._is_over.is_set():
                return
            self.write()
            if self._logs_are_due:
                self._logs_are_due = False
                self._try("stored", self._logs.store_changed)
                self._try("complete", self._say_where_tensorboard_is)
            self._is_over.wait(UPDATE_SECONDS)

    def _try(self, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except (OSError, httpx.HTTPError, PrefectException, TrialflowError) as error:
            if what not in self._warned:
                self._logger.warning(
                    "the report is not %s (said once, training goes on): %s: %s",
                    what, type(error).__name__, error,
                )  # fmt: skip
            self._warned.add(what)

    # ---------------------------------------------------------------------------- internals

    @contextmanager
    def _changing(self) -> Iterator[TrialFacts]:
        """The facts, nobody else's for the length of the block; then the report is to be written.

        The ranks' channel, uploads and the flow tell of the run, each in a thread of its own.
        """
        with self._lock:
            yield self._facts
        self._has_changed.set()

    @property
    def _asked_to_stop(self) -> str | None:
        asked = self._stopping.request if self._stopping is not None else None
        return None if asked is None else str(asked)

    def _earlier_story(self) -> ReportHistory | None:
        """The newest of what is known of the trial's runs before this one: here, or stored."""
        stories: list[ReportHistory] = []

        def read(source: Callable[[], bytes | None]) -> None:
            try:
                if data := source():
                    stories.append(ReportHistory.from_json(data))
            except msgspec.MsgspecError as error:
                self._logger.warning("an earlier report cannot be read: %s", error)

        if self._story_path.exists():
            self._try("complete", lambda: read(self._story_path.read_bytes))
        self._try("complete", lambda: read(lambda: self._logs.stored(STORY)))
        return max(stories, key=lambda story: story.written_at, default=None)

    def _say_where_tensorboard_is(self) -> None:
        """Its files are stored with checkpoints, and wanted all the more if the run then fails."""
        if "TensorBoard" not in self._facts.places and (url := self._logs.tensorboard()):
            with self._changing() as facts:
                facts.places = {"TensorBoard": url, **facts.places}

    def _say_what_was_left_out(self) -> None:
        if count := self._log_caps.left_out():
            self._logger.info("… %d lines of the ranks are only in their log files", count)


def _remember(memory: dict[Any, float], key: int | str, value: float) -> None:
    memory[key] = value
    if len(memory) > REMEMBERED:
        del memory[next(iter(memory))]


def _replace(path: Path, data: bytes) -> None:
    # Whoever reads it meanwhile sees the last state, whole.
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_bytes(data)
    os.replace(temporary, path)
