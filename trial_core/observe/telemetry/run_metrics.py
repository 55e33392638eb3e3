"""The metrics of a run; docs/guides/opentelemetry.md lists them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.metrics import MeterProvider

from trial_core.common import text_format
from trial_core.messages import MetricsKind
from trial_core.observe.events.observers import Observer, WorkloadTimes
from trial_core.observe.events.run_status import TRAINING, UPLOAD
from trial_core.observe.ledger.run_clock import BUCKETS, RunClock
from trial_core.observe.ledger.time_ledger import RunTime

MAX_METRICS = 32
"""How many of a trial's own metrics are reported of each kind, as each is a time series."""
SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
"""Bounds of the buckets of durations: stages take milliseconds in tests, and hours at most."""
BYTES = tuple(10.0**exponent for exponent in range(6, 14))
COUNTERS = {
    "trialflow.batches": ("{batch}", "Batches trained, those trained again included"),
    "trialflow.samples": ("{sample}", "Samples trained"),
    "trialflow.restarts": ("{restart}", "Restarts after a failure"),
    # Not histograms, which would have 16 series for each rank.
    "trialflow.data_wait.time": ("s", "Time in train-workloads that a rank waited for data"),
    "trialflow.step.time": (
        "s",
        "Time in train-workloads without the wait for data: forward, backward, optimizer",
    ),
}
GAUGES = {
    "trialflow.forward_pass.duration": ("s", "Mean of a forward pass in the last workload"),
    "trialflow.slot.time": ("s", "Time of all slots since the run began, by what they do"),
    "trialflow.learning_rate": ("", "Learning rate after the last workload"),
    "trialflow.training.metric": ("", "Last training metrics, reduced over the ranks"),
    "trialflow.validation.metric": ("", "Last validation metrics"),
}
TIMED_STAGES = {
    TRAINING: ("trialflow.train.duration", "s", "How long a train-workload took"),
    "validate": ("trialflow.validation.duration", "s", "How long a validation took"),
    "checkpoint-save": (
        "trialflow.checkpoint.stall.duration", "s", "How long training waited for a snapshot",
    ),
    UPLOAD: ("trialflow.upload.duration", "s", "How long an upload took until it was committed"),
}  # fmt: skip


class RunMetrics(Observer):
    def __init__(
        self, provider: MeterProvider, experiment: str, trial: str, clock: RunClock
    ) -> None:
        meter = provider.get_meter("trialflow")
        self._attributes = {"trialflow.trial": trial, "trialflow.experiment": experiment}
        self._clock = clock
        self._lock = threading.Lock()
        self._reached = 0
        self._counters = {name: meter.create_counter(name, *is_) for name, is_ in COUNTERS.items()}
        self._gauges = {name: meter.create_gauge(name, *is_) for name, is_ in GAUGES.items()}
        self._durations = {
            stage: meter.create_histogram(*is_, explicit_bucket_boundaries_advisory=SECONDS)
            for stage, is_ in TIMED_STAGES.items()
        }
        self._checkpoint_size = meter.create_histogram(
            "trialflow.checkpoint.size",
            "By",
            "All files of a committed checkpoint",
            explicit_bucket_boundaries_advisory=BYTES,
        )

    def trial_owned(self, attempt: int, earlier: Sequence[RunTime] = ()) -> None:
        self._add("trialflow.restarts", 0)  # a series that is 0 until it is more

    def run_started(
        self, trial: str, total_batches: int, begins_at: int, batch_samples: int
    ) -> None:
        with self._lock:
            self._reached = begins_at

    def stage_ended(self, stage: str, detail: str, seconds: float) -> None:
        if (duration := self._durations.get(stage)) is not None:
            duration.record(seconds, self._attributes)
        self.note_slots()

    def batches_trained(self, batches: int) -> None:
        with self._lock:
            trained = batches - self._reached
            self._reached = max(self._reached, batches)
        if trained > 0:
            self._add("trialflow.batches", trained)

    def training_timed(self, timed: WorkloadTimes) -> None:
        self.batches_trained(timed.reached)
        self._add("trialflow.samples", timed.samples)
        for rank, waited in enumerate(timed.data_seconds):
            self._add("trialflow.data_wait.time", waited, rank=rank)
            self._add("trialflow.step.time", max(0.0, timed.seconds - waited), rank=rank)
        for rank, each in enumerate(timed.forward_seconds):
            if each:
                self._set("trialflow.forward_pass.duration", each, rank=rank)

    def learning_rates_read(self, batches: int, learning_rates: Sequence[float | None]) -> None:
        for optimizer, rate in enumerate(learning_rates):
            if rate is not None:
                self._set("trialflow.learning_rate", rate, optimizer=optimizer)

    def metrics_reported(self, kind: MetricsKind, batches: int, metrics: Mapping[str, Any]) -> None:
        if kind == "training":  # the only sign of a script's batches
            self.batches_trained(batches)
        numbers = ((name, each) for name, each in metrics.items() if text_format.is_number(each))
        for name, value in itertools.islice(numbers, MAX_METRICS):
            self._set(f"trialflow.{kind}.metric", float(value), metric=name)

    def checkpoint_committed(
        self, uuid: str, batches: int, total_bytes: int, digest: str = ""
    ) -> None:
        self._checkpoint_size.record(total_bytes, self._attributes)

    def restarting(self, reason: str, attempt: int, max_restarts: int) -> None:
        self._add("trialflow.restarts", 1)

    def note_slots(self) -> None:
        """Set the time that the slots have spent until now."""
        spent = self._clock.slot_milliseconds()
        for bucket in BUCKETS:
            if bucket in spent:
                self._set("trialflow.slot.time", spent[bucket] / 1000, bucket=bucket)

    def _add(self, name: str, amount: float, **attributes: str | int) -> None:
        self._counters[name].add(amount, self._of(**attributes))

    def _set(self, name: str, value: float, **attributes: str | int) -> None:
        self._gauges[name].set(value, self._of(**attributes))

    def _of(self, **attributes: str | int) -> dict[str, str | int]:
        named = {f"trialflow.{name}": value for name, value in attributes.items()}
        return {**self._attributes, **named}
