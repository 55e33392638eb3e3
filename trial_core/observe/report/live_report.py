"""The live report: an observer that updates the report while its run trains."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from trial_core.checkpoint import layout
from trial_core.checkpoint.manifest import Topology
from trial_core.checkpoint.storage.local_files import replace_file
from trial_core.checkpoint.store import CheckpointStore
from trial_core.common import text_format
from trial_core.common.any_logger import AnyLogger
from trial_core.common.decoding import decode
from trial_core.config import ExperimentConfig
from trial_core.errors import Superseded, TrialflowError
from trial_core.messages import MetricsKind
from trial_core.observe.events.observers import Observer, WorkloadTimes
from trial_core.observe.events.run_status import UPLOAD
from trial_core.observe.events.throughput import Throughput
from trial_core.observe.ledger.time_ledger import TimeLedger
from trial_core.observe.report.history import ReportHistory, SavedCheckpoint
from trial_core.observe.report.html_report import render_html
from trial_core.observe.report.rank_logs import LogLimits, StoredLogs
from trial_core.observe.report.trial_report import TrialFacts
from trial_core.observe.trackers.journal import DRIVER_EVENTS, PAGE as PAGE
from trial_core.processes.machine.system_use import SystemUse
from trial_core.processes.slots.log_pump import WARNING_PATTERN
from trial_core.schedule.ending import Ending
from trial_core.schedule.stop_requests import StopHandler

UPDATE_SECONDS = 5.0
REPORT, HISTORY = "report.md", "report.json"
# The page has 5 MB, and its readers reload it by hand.
PAGE_SECONDS = 60.0
KILLED = "killed, or its machine was lost"
# Validations and saves whose checkpoint is not committed yet.
MAX_PENDING = 32


class Report(Observer):
    """Updates a trial's report.

    A context manager. Inside the block a thread writes the report after changes, at most every 5 s.
    After a commit it also stores the report and the ranks' logs. A report that cannot be written is
    only a warning: it neither ends training nor hides why training ended. `publish` shows its
    Markdown elsewhere, too: one thread calls it, in the context in which the report was created.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        trial: str,
        run_dir: Path,
        store: CheckpointStore | None = None,  # by default in the experiment's storage
        stopping: StopHandler | None = None,
        ledger: Callable[[], TimeLedger] | None = None,  # reads the trial's; None leaves it out
        ending: Ending | None = None,
        *,
        logger: AnyLogger,  # also gets a limited number of lines from the ranks
        publish: Callable[[str], None] | None = None,
        publish_errors: tuple[type[Exception], ...] = (),  # besides OSError and TrialflowError
        has_metric: bool = True,
        links: Mapping[str, str] = MappingProxyType({}),  # the run's pages elsewhere, by name
    ) -> None:
        place = config.checkpoint_storage
        store = store or CheckpointStore(place.url, place.options)
        self.path = run_dir / REPORT  # the page is next to it
        self._history_path = run_dir / HISTORY
        self._page_path = run_dir / PAGE
        self._page_is_due_at = 0.0
        self._stopping = stopping
        self._ending = ending or Ending(stopping)
        self._logger = logger
        self._logs = StoredLogs(
            store, trial, run_dir, (REPORT, HISTORY, PAGE, f"{DRIVER_EVENTS}/*")
        )
        self._facts = TrialFacts(
            config.name, trial, config.searcher.metric, config.searcher.smaller_is_better,
            f"{store.url}/{layout.CHECKPOINTS}",
            {**links, **self._logs.locations("HTML report", PAGE)},
            ledger=ledger, has_metric=has_metric, entrypoint=config.entrypoint,
            hyperparameters=dict(text_format.flat(config.hyperparameters)),
        )  # fmt: skip
        self._publish = publish
        self._errors: tuple[type[Exception], ...] = (OSError, TrialflowError, *publish_errors)
        self._log_limits = LogLimits()
        self._searcher_metrics: dict[int, float] = {}
        self._blocked_seconds: dict[str, float] = {}
        self._warned: set[str] = set()
        self._placed: str | None = None
        self._system = SystemUse(UPDATE_SECONDS)
        self._used_at, self._measured, self._use = -1, 0, dict[str, float]()
        earlier = self._read_history()
        # How the previous run ended; None without one, empty once this run trains.
        self._previous_end: str | None = None
        if earlier is not None:
            self._previous_end = earlier.ended or KILLED
            earlier.ended = ""
            self._facts.history = earlier
        self._facts.history.links = dict(links)
        self._text = ""
        self._lock, self._writing = threading.RLock(), threading.Lock()
        self._has_changed = threading.Event()
        self._has_ended = threading.Event()
        self._logs_are_due = False
        # `publish` needs this context: Prefect's flow run and settings are context variables.
        self._context = contextvars.copy_context()
        self._thread = self._in_context(self._keep_writing)

    def run_started(
        self, trial: str, total_batches: int, begins_at: int, batch_samples: int
    ) -> None:
        with self._update() as facts:
            facts.history.go_back_to(begins_at)
            if self._previous_end is not None or begins_at:
                what = "resumed from the last checkpoint" if begins_at else "started from scratch"
                end = f"; previous run: {self._previous_end}" if self._previous_end else ""
                facts.history.add_event(begins_at, f"{what}{end}")
            self._previous_end = ""
            facts.run_status.run_started(trial, total_batches, begins_at, batch_samples)

    def length_known(self, total_batches: int) -> None:
        with self._update() as facts:
            facts.run_status.length_known(total_batches)

    def trial_built(self, topology: Topology, versions: Mapping[str, str], code: str) -> None:
        with self._update() as facts:
            facts.topology, facts.versions, facts.code = topology.description, versions, code

    def ranks_placed(self, nodes: Sequence[str]) -> None:
        placed = text_format.ranks_by_node(nodes)
        with self._update() as facts:
            if self._placed not in (None, placed):
                facts.history.add_event(facts.run_status.batches, f"now {placed}")
            self._placed = placed
            facts.placed = placed if len(set(nodes)) > 1 else ""

    def stage_started(self, stage: str, detail: str) -> None:
        with self._update() as facts:
            facts.run_status.stage_started(stage, detail)

    def stage_takes_long(self, activity: str) -> None:
        with self._update() as facts:
            facts.run_status.stage_takes_long(activity)

    def stage_ended(self, stage: str, detail: str, seconds: float) -> None:
        with self._update() as facts:
            facts.run_status.stage_ended(stage, detail, seconds)
            if stage == "checkpoint-save":
                _remember(self._blocked_seconds, detail, seconds)

    def stage_failed(self, stage: str, detail: str) -> None:
        with self._update() as facts:
            facts.run_status.stage_failed(stage, detail)

    def batches_trained(self, batches: int) -> None:
        with self._update() as facts:
            facts.run_status.batches_trained(batches)

    def training_timed(self, timed: WorkloadTimes) -> None:
        with self._update() as facts:
            facts.waits.append((timed.seconds, tuple(timed.data_seconds)))
            facts.forward_seconds = tuple(timed.forward_seconds)

    def throughput_measured(self, batches: int, now: Throughput, whole_run: Throughput) -> None:
        rates = {"samples/s": now.samples_per_second, "tokens/s": now.tokens_per_second}
        known = {unit: each for unit, each in rates.items() if each is not None}
        with self._update() as facts:
            facts.run_status.throughput_measured(batches, now, whole_run)
            if known:
                facts.history.add_point("speed", batches, known)

    def learning_rates_read(self, batches: int, learning_rates: Sequence[float | None]) -> None:
        names = ["learning rate"]
        if len(learning_rates) > 1:
            names = [f"learning rate of optimizer {i}" for i in range(len(learning_rates))]
        with self._update() as facts:
            rates = dict(zip(names, learning_rates, strict=False))
            facts.history.add_point("learning_rate", batches, rates)

    def metrics_reported(self, kind: MetricsKind, batches: int, metrics: Mapping[str, Any]) -> None:
        with self._update() as facts:
            facts.run_status.metrics_reported(kind, batches, metrics)
            facts.last[kind] = (batches, metrics)
            facts.history.add_point(kind, batches, metrics)
            metric = metrics.get(facts.searcher_metric)
            if kind == "validation" and text_format.is_finite_number(metric):
                _remember(self._searcher_metrics, batches, float(metric))

    def checkpoint_committed(
        self, uuid: str, batches: int, total_bytes: int, digest: str = ""
    ) -> None:
        with self._update() as facts:
            upload = facts.run_status.running(UPLOAD, f"@{batches}")
            saved = SavedCheckpoint(
                uuid=uuid,
                batches=batches,
                total_bytes=total_bytes,
                metric=self._searcher_metrics.get(batches),
                blocked_seconds=self._blocked_seconds.pop(f"@{batches}", None),
                upload_seconds=None if upload is None else facts.run_status.seconds_in(upload),
            )
            facts.run_status.checkpoint_committed(uuid, batches, total_bytes)
            facts.history.add_checkpoint(saved, facts.smaller_is_better)
            self._logs_are_due = True

    def checkpoint_deleted(self, uuid: str) -> None:
        with self._update() as facts:
            facts.history.drop_checkpoint(uuid)

    def notice(self, text: str) -> None:
        with self._update() as facts:
            facts.history.add_event(facts.run_status.batches, text)

    def rank_logged(self, rank: int, line: str) -> None:
        is_alarming = WARNING_PATTERN.search(line) is not None
        if self._log_limits.allows(rank, is_alarming):
            self._log_dropped_lines()
            log = self._logger.warning if is_alarming else self._logger.info
            log("[rank %d] %s", rank, line)

    def moving(self, what: str) -> None:
        with self._update() as facts:
            facts.history.add_event(facts.run_status.batches, text_format.one_line(what))
            facts.run_status.moving(what)

    def restarting(self, reason: str, attempt: int, max_restarts: int) -> None:
        with self._update() as facts:
            batches = facts.run_status.batches
            what = f"restart {attempt} of at most {max_restarts}: {text_format.one_line(reason)}"
            facts.history.add_event(batches, what)
            facts.run_status.restarting(reason, attempt, max_restarts)

    @property
    def last_checkpoint(self) -> str:
        """The place of the newest checkpoint, to be appended to a sentence; empty without one."""
        at = self._facts.run_status.committed_at
        return "" if at is None else f"; the last checkpoint is at batch {at}"

    def run_ended(self, status: str, tensorboard_url: str | None = None) -> None:
        if self._system.has_something():
            self._attempt("complete", self._note_use)
        with self._lock:
            self._facts.status, self._facts.is_over = status, True
            self._facts.history.ended = status
            if tensorboard_url:
                self._facts.locations = {"TensorBoard": tensorboard_url, **self._facts.locations}
        self.write()  # here: the thread may hang in `publish`
        self._end_updates()

    def trackers_lack(self, lacking: Mapping[str, int]) -> None:
        """Show how many records each of these trackers lacks, after `run_ended`."""
        with self._lock:
            self._facts.lacking = lacking
        self.write()

    def __enter__(self) -> Report:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Store the report with the logs, and wait until it is published."""
        self._end_updates()
        self._log_dropped_lines()
        if not isinstance(error, Superseded):  # else the newer run stores its report
            store = partial(self._logs.store, is_final=True)
            storing = threading.Thread(target=self._attempt, args=["stored", store], daemon=True)
            storing.start()
            if not self._ending.join(storing):
                self._logs.cut_short()
        if self._ending.join(self._thread) and self._facts.lacking:  # it did not show that yet
            self._thread = self._in_context(self._publish_text)
            self._thread.start()
            self._ending.join(self._thread)

    def _in_context(self, work: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=lambda: self._context.run(work), name="report", daemon=True)

    def write(self, unless_over: bool = False) -> None:
        """Write the report's present state: its files and its history. `unless_over`: not if the
        run has ended, whose last state is written, and may be stored now."""
        with self._writing:
            with self._lock:
                if unless_over and self._facts.is_over:
                    return
                asked = None if self._stopping is None else self._stopping.request
                if asked is not None and not self._facts.is_over:
                    self._facts.status = f"stopping: {asked}"
                self._text = self._facts.render()
                files = {
                    self.path: self._text.encode(),
                    self._history_path: self._facts.history.to_json(),
                }
                now = time.monotonic()
                if self._facts.is_over or now >= self._page_is_due_at:
                    self._page_is_due_at = now + PAGE_SECONDS
                    files[self._page_path] = render_html(self._facts).encode()
            for path, data in files.items():
                self._attempt("up to date", partial(replace_file, path, data))

    def _end_updates(self) -> None:
        self._has_ended.set()
        self._has_changed.set()
        self._logs.cut_short()

    def _keep_writing(self) -> None:
        while not self._has_ended.is_set():
            has_changed = self._has_changed.wait(self._system.seconds_left())
            if self._system.seconds_left() == 0:
                self._attempt("complete", self._note_use)
            if not has_changed:
                continue
            self._has_changed.clear()
            if self._has_ended.is_set():
                break
            self.write(unless_over=True)
            self._publish_text()
            if self._logs_are_due:
                self._logs_are_due = False
                self._attempt("stored", self._logs.store)
                self._attempt("complete", self._add_tensorboard)
            self._has_ended.wait(UPDATE_SECONDS)
        self._publish_text()

    def _note_use(self) -> None:
        """Add the machine's use to the curves: at each batch, the mean of what was measured."""
        values = self._system.measure()
        with self._lock:
            status, use = self._facts.run_status, self._use
            if status.trial is None:  # the batch at which the run begins is not known
                return
            if status.batches != self._used_at:
                self._used_at, self._measured = status.batches, 0
                use.clear()
            self._measured += 1
            for name, value in values.items():
                if value is not None and name.endswith("_percent"):
                    use[name] = use.get(name, value)
                    use[name] += (value - use[name]) / self._measured
            self._facts.history.add_point("machine", status.batches, use)

    def _publish_text(self) -> None:
        if (publish := self._publish) is not None:
            self._attempt("up to date", lambda: publish(self._text))

    def _attempt(self, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except self._errors as error:
            if what not in self._warned:
                self._logger.warning(
                    "the report is not %s (logged once; training continues): %s: %s",
                    what, type(error).__name__, error,
                )  # fmt: skip
            self._warned.add(what)

    @contextmanager
    def _update(self) -> Iterator[TrialFacts]:
        """Lock the facts for the block, and have the report written afterwards. The channel, the
        uploads and the flow each call the observer in their own thread."""
        with self._lock:
            yield self._facts
        self._has_changed.set()

    def _read_history(self) -> ReportHistory | None:
        """The history of the trial's earlier runs: the newer of the local and stored copies."""
        found: list[ReportHistory] = []

        def read(source: Callable[[], bytes | None]) -> None:
            try:
                if data := source():
                    found.append(decode(data, ReportHistory))
            except msgspec.MsgspecError as error:
                self._logger.warning("the history of an earlier report cannot be read: %s", error)

        if self._history_path.exists():
            self._attempt("complete", lambda: read(self._history_path.read_bytes))
        self._attempt("complete", lambda: read(lambda: self._logs.stored(HISTORY)))
        return max(found, key=lambda history: history.written_at, default=None)

    def _add_tensorboard(self) -> None:
        """Add the TensorBoard files to the locations, once a checkpoint has stored them."""
        if "TensorBoard" not in self._facts.locations and (url := self._logs.tensorboard()):
            with self._update() as facts:
                facts.locations = {"TensorBoard": url, **facts.locations}

    def _log_dropped_lines(self) -> None:
        if count := self._log_limits.dropped():
            self._logger.info("… %d more lines of the ranks are only in their log files", count)


def _remember(memory: dict[Any, float], key: int | str, value: float) -> None:
    memory[key] = value
    if len(memory) > MAX_PENDING:
        del memory[next(iter(memory))]
