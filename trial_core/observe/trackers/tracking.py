"""Tracks a run: an observer that writes the trial's journal, and starts the sender."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from typing_extensions import Self

from trial_core.checkpoint.manifest import Topology
from trial_core.checkpoint.store import CheckpointStore
from trial_core.common import text_format
from trial_core.common.any_logger import AnyLogger
from trial_core.config import ExperimentConfig
from trial_core.errors import Superseded
from trial_core.messages import MetricsKind
from trial_core.observe.events.observers import Observer, WorkloadTimes
from trial_core.observe.events.throughput import Throughput
from trial_core.observe.ledger.time_ledger import TimeLedger
from trial_core.observe.trackers import records
from trial_core.observe.trackers.journal import FOLDER, JOURNAL, ORDER, JournalWriter
from trial_core.observe.trackers.sender import SenderOrder, SenderProcess, unsent
from trial_core.observe.trackers.stored_journal import adopt_stored, keep
from trial_core.observe.trackers.tracker import find_tracker, without_user
from trial_core.processes.machine.background import in_background
from trial_core.schedule.ending import Ending
from trial_core.schedule.stop_requests import outcome_of

# How long the sender sends after the run has ended; less if the end has less time.
PATIENCE_SECONDS = 15.0
FIRST_RESTART_SECONDS, LONGEST_RESTART_SECONDS = 10.0, 600.0


def check_trackers(config: ExperimentConfig) -> None:
    """Refuse trackers that are not installed, and options that they do not have: ConfigError."""
    for name, options in trackers_of(config).items():
        find_tracker(name).check(options)


def trackers_of(config: ExperimentConfig) -> dict[str, dict[str, Any]]:
    return {name: options for each in config.trackers for name, options in each.items()}


def tracker_pages(config: ExperimentConfig) -> dict[str, str]:
    """The addresses of the experiment's trackers that are servers, without credentials."""
    return {
        name: without_user(place)
        for name, options in _remembered(config).items()
        for place in options.values()
        if isinstance(place, str) and place.startswith(("http://", "https://"))
    }


def _remembered(config: ExperimentConfig) -> dict[str, dict[str, Any]]:
    there = {**os.environ, **config.environment.environment_variables}
    return {
        name: find_tracker(name).remembered(options, there)
        for name, options in trackers_of(config).items()
    }


class Tracking(Observer):
    """Writes a run's events into its trial's journal. A context manager around the run.

    Every failure is only a warning: it does not end the run.

    Args:
        ledger: reads the trial's ledger of time.
        ending: limits the wait for the sender and the storage.
        tell: called after the run's end with how many records each tracker lacks, if one does.
    """

    def __init__(
        self, config: ExperimentConfig, trial: str, run_dir: Path, store: CheckpointStore,
        attempt: int, ledger: Callable[[], TimeLedger], ending: Ending, logger: AnyLogger,
        tell: Callable[[Mapping[str, int]], None] = lambda lacking: None,
    ) -> None:  # fmt: skip
        self._config = config
        self._trackers = trackers_of(config)
        self._trial = trial
        self._run_dir = run_dir
        self._store = store
        self._attempt = attempt
        self._ledger = ledger
        self._ending = ending
        self._logger = logger
        self._tell = tell
        self._batches = self._samples = 0
        self._status = ""
        self._journal: JournalWriter | None = None
        self._sender: SenderProcess | None = None
        self._restarts_sender_at = 0.0
        self._restart_pause = FIRST_RESTART_SECONDS
        self._has_warned = False
        self._keeping = threading.Lock()
        self._waking = threading.Lock()

    def __enter__(self) -> Self:
        if not self._trackers:
            return self
        with self._warning("its trackers show nothing of this run"):
            adopt_stored(self._store, self._trial, self._run_dir, self._logger)
            self._journal = JournalWriter(self._run_dir / FOLDER / JOURNAL)
            self._start_sender()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if not self._trackers:
            return
        if not isinstance(error, Superseded):  # else the newer run is the same run in the trackers
            self._measure_time()
            status = self._status or ("completed" if error is None else f"failed: {error}")
            outcome, why = outcome_of(status)
            why = text_format.shortened(why)
            self._append(records.RunEnded(at=time.time(), outcome=outcome, why=why))
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        if self._sender is not None:
            self._sender.end(self._ending.wait)
        with self._warning("what its trackers have got is not known"):
            lacking = unsent(self._run_dir, [*self._trackers])
            if lacking and not isinstance(error, Superseded):
                self._tell(lacking)
            for name, count in lacking.items():
                self._logger.warning(
                    "tracker %s has not got %s; the trial's next run sends them, or trialflow runs "
                    "sync %s",
                    name, text_format.plural(count, "record"), self._trial,
                )  # fmt: skip
        keeping = threading.Thread(target=self._keep, args=[True], name="trackers", daemon=True)
        keeping.start()
        if not self._ending.join(keeping):
            self._logger.warning(
                "the journal of trial %s is not stored: the storage did not take it in time",
                self._trial,
            )

    def trial_built(self, topology: Topology, versions: Mapping[str, str], code: str) -> None:
        divided = {
            f"trialflow.{name}": str(value)
            for name, value in msgspec.to_builtins(topology).items()
            if value
        }
        tags = {
            "trialflow.trial": self._trial, "trialflow.experiment": self._config.name,
            "trialflow.code": code, "trialflow.labels": ", ".join(self._config.labels),
            **divided, **{f"version.{name}": text for name, text in versions.items()},
        }  # fmt: skip
        given = {name: text for name, text in tags.items() if text}
        self._append(
            records.Described(at=time.time(), parameters=parameters(self._config), tags=given)
        )

    def samples_trained(self, samples: int) -> None:
        self._samples = samples

    def run_started(
        self, trial: str, total_batches: int, begins_at: int, batch_samples: int
    ) -> None:
        self._batches = begins_at
        self._append(records.Began(at=time.time(), batches=begins_at, attempt=self._attempt))

    def metrics_reported(self, kind: MetricsKind, batches: int, metrics: Mapping[str, Any]) -> None:
        self._batches = batches
        values = {f"{kind}/{name}": value for name, value in metrics.items()}
        if kind == "training" and self._samples:
            values["progress/samples"] = self._samples
        self._measured(batches, values)

    def learning_rates_read(self, batches: int, learning_rates: Sequence[float | None]) -> None:
        known = {
            f"learning_rate/{i}": rate for i, rate in enumerate(learning_rates) if rate is not None
        }
        self._measured(batches, known)

    def training_timed(self, timed: WorkloadTimes) -> None:
        self._samples = timed.samples and self._samples + timed.samples  # 0: unknown from here on
        if timed.data_seconds and timed.seconds > 0:
            waited = 100 * max(timed.data_seconds) / timed.seconds
            self._measured(timed.reached, {"speed/data_wait_percent": waited})

    def throughput_measured(self, batches: int, now: Throughput, whole_run: Throughput) -> None:
        values = {
            "speed/batches_per_second": now.batches_per_second,
            "speed/samples_per_second": now.samples_per_second,
            "speed/tokens_per_second": now.tokens_per_second,
            "speed/mfu_percent": None if now.mfu is None else 100 * now.mfu,
            "memory/peak_bytes": max(now.peak_memory_bytes, default=0) or None,
        }
        self._measured(batches, values)

    def stage_ended(self, stage: str, detail: str, seconds: float) -> None:
        if stage == "checkpoint-save":
            self._measured(self._batches, {"checkpoint/stall_seconds": seconds})

    def checkpoint_committed(
        self, uuid: str, batches: int, total_bytes: int, digest: str = ""
    ) -> None:
        self._append(records.Committed(
            at=time.time(), batches=batches, uuid=uuid, url=self._store.files_url(uuid),
            size_bytes=total_bytes, digest=digest,
        ))  # fmt: skip
        self._measure_time()
        in_background(self._keep, "trackers")

    def _keep(self, is_end: bool = False) -> None:
        """Store the journal; during training, only if it is not being stored."""
        if self._keeping.acquire(blocking=is_end):
            try:
                keep(self._store, self._trial, self._run_dir, self._logger, is_end)
            finally:
                self._keeping.release()

    def checkpoint_deleted(self, uuid: str) -> None:
        self._append(records.Deleted(at=time.time(), uuid=uuid))

    def notice(self, text: str) -> None:
        short = text_format.shortened(text)
        self._append(records.Noted(at=time.time(), batches=self._batches, text=short))

    def moving(self, what: str) -> None:
        self.notice(what)

    def stalled(self, during: str, seconds: float, reason: str) -> None:
        self.notice(f"the ranks have hung for {seconds:.0f} s in {during}: {reason}")

    def restarting(self, reason: str, attempt: int, max_restarts: int) -> None:
        self.notice(f"restart {attempt} of at most {max_restarts}: {reason}")

    def run_ended(self, status: str, tensorboard_url: str | None = None) -> None:
        self._status = status

    def _measure_time(self) -> None:
        spent = self._ledger().slot_milliseconds
        values = {
            f"time/{bucket.replace(' ', '_')}_seconds": ms / 1000 for bucket, ms in spent.items()
        }
        self._measured(self._batches, values)

    def _measured(self, batches: int, values: Mapping[str, Any]) -> None:
        if numbers := text_format.finite_numbers(values):
            self._append(records.Metrics(
                at=time.time(), batches=batches, samples=self._samples,
                attempt=self._attempt, values=numbers,
            ))  # fmt: skip

    def _start_sender(self) -> None:
        self._restarts_sender_at = time.monotonic() + self._restart_pause
        order = SenderOrder(
            trial=self._trial, experiment=self._config.name, run_dir=str(self._run_dir),
            trackers=self._trackers, patience_seconds=PATIENCE_SECONDS,
        )  # fmt: skip
        variables = self._config.environment.environment_variables
        remembered = msgspec.structs.replace(order, trackers=_remembered(self._config))
        (self._run_dir / FOLDER / ORDER).write_bytes(msgspec.json.encode(remembered))
        self._sender = SenderProcess(order, variables, self._logger.warning)

    def _restart_sender(self) -> None:
        """Start the sender again after it has died, with growing pauses."""
        if time.monotonic() < self._restarts_sender_at:
            return
        if self._restart_pause == FIRST_RESTART_SECONDS:
            self._logger.warning(
                "the process that sends to the trackers has died: starting another (said once)"
            )
        self._restart_pause = min(2 * self._restart_pause, LONGEST_RESTART_SECONDS)
        if self._sender is not None:
            self._sender.end(lambda has_ended: True)  # ends its child processes
            self._sender = None
        self._start_sender()

    def _append(self, record: records.AnyRecord) -> None:
        if self._journal is None:
            return
        with self._warning("its trackers lack a part of this run"):
            self._journal.append(record)
            with self._waking:
                if self._sender is None or not self._sender.wake():
                    self._restart_sender()

    @contextmanager
    def _warning(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, TypeError, msgspec.MsgspecError) as error:
            if not self._has_warned:
                self._logger.warning("trial %s: %s: %s", self._trial, what, error)
            self._has_warned = True


def parameters(config: ExperimentConfig) -> dict[str, str | int | float | bool | None]:
    """Hyperparameters by their paths, and the experiment's other settings below ``trialflow.``."""
    settings = config.digested()
    hyperparameters = settings.pop("hyperparameters", {})
    rest = {f"trialflow.{k}": value for k, value in _plain(settings) if value not in (None, "")}
    return {**rest, **dict(_plain(hyperparameters))}


def _plain(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Plain values by their paths; lists as text."""
    for name, value in text_format.flat(fields):
        is_plain = isinstance(value, (str, int, float, bool)) or value is None
        yield name, value if is_plain else ", ".join(map(str, value))
