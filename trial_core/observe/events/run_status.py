"""The status of a run, derived from its events: stage, metrics, speed, time left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trial_core.observe.events.observers import Observer
from trial_core.observe.events.throughput import Throughput

if TYPE_CHECKING:  # as `observers`
    from trial_core.messages import MetricsKind

TRAINING = "train-workload"
UPLOAD = "checkpoint-upload"

# Long enough for a steady value, short enough to follow a change.
SPEED_WINDOW_SECONDS = 10.0
SPEED_STEP_SECONDS = 0.05


@dataclass(frozen=True)
class Stage:
    """A running stage, and when it began by the status's clock."""

    name: str
    detail: str
    began: float

    def __str__(self) -> str:
        return f"{self.name} {self.detail}".rstrip()


class RunStatus(Observer):
    """Keeps the reported events. An overriding method calls the one of this class first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.trial: str | None = None
        self.batches = 0  # trained so far
        self.total_batches = 0  # at the end
        self.batch_samples = 0  # samples in one batch; 0 if unknown
        self.training: Mapping[str, Any] = {}  # the last reported metrics
        self.validation: Mapping[str, Any] = {}  # likewise
        self.validated_at: int | None = None
        self.committed_at: int | None = None  # batches at the last commit; None before any
        self.has_trained = False
        self.activity = ""  # of the present stage, if it takes long; else empty
        self.last_throughput = Throughput()  # the last train-workload's
        self.run_throughput = Throughput()  # that of all train-workloads of this run
        self._begins_at = 0
        self._began = clock()
        self._running: dict[tuple[str, str], Stage] = {}
        self._waiting = Stage("starting", "", clock())
        # Seconds spent in train-workloads, and batches trained by then.
        self._speed_points: deque[tuple[float, int]] = deque()
        self._trained_seconds = 0.0
        self._workload_began: float | None = None

    def waiting_for(self, what: str) -> None:
        """Set what the run waits for, before the first stage or between stages."""
        self._waiting = Stage(what, "", self._clock())

    def run_started(
        self, trial: str, total_batches: int, begins_at: int, batch_samples: int
    ) -> None:
        self.trial, self.total_batches, self.batch_samples = trial, total_batches, batch_samples
        self.batches = self._begins_at = begins_at
        # A rank may have died after a commit and before the report of it.
        self.committed_at = begins_at or None
        self._began = self._clock()
        self._speed_points = deque([(self._trained_seconds, begins_at)])

    def length_known(self, total_batches: int) -> None:
        self.total_batches = total_batches

    def stage_takes_long(self, activity: str) -> None:
        self.activity = activity

    def stage_started(self, stage: str, detail: str) -> None:
        now = self._clock()
        self.activity = ""
        self._running[stage, detail] = Stage(stage, detail, now)
        if stage == TRAINING:
            self._workload_began = now

    def stage_ended(self, stage: str, detail: str, seconds: float) -> None:
        self._running.pop((stage, detail), None)
        self.activity = ""
        is_over = bool(self.total_batches) and self.batches >= self.total_batches
        self._waiting = Stage("ending" if is_over else "waiting", "", self._clock())
        if stage == TRAINING:
            self._workload_began = None
            self._trained_seconds += seconds

    def stage_failed(self, stage: str, detail: str) -> None:
        self._running.pop((stage, detail), None)

    def batches_trained(self, batches: int) -> None:
        self.batches = max(self.batches, batches)
        self.has_trained = True
        began = self._workload_began
        if began is not None:
            self._note_speed(self._trained_seconds + self._clock() - began)

    def throughput_measured(self, batches: int, now: Throughput, whole_run: Throughput) -> None:
        self.last_throughput, self.run_throughput = now, whole_run

    def metrics_reported(self, kind: MetricsKind, batches: int, metrics: Mapping[str, Any]) -> None:
        self.batches = max(self.batches, batches)
        if kind == "training":
            self.training = metrics
            self.has_trained = True
            self._note_speed(self._trained_seconds)
        else:
            self.validation, self.validated_at = metrics, batches

    def checkpoint_committed(
        self, uuid: str, batches: int, total_bytes: int, digest: str = ""
    ) -> None:
        self.committed_at = batches

    def moving(self, what: str) -> None:
        self._launched_again()

    def restarting(self, reason: str, attempt: int, max_restarts: int) -> None:
        self._launched_again()

    def _launched_again(self) -> None:
        self._running.clear()
        self.activity = ""
        self.waiting_for("starting the ranks again")

    @property
    def had_batches_left(self) -> bool:
        """True if the run began before the trial's maximum length, or that length is unknown."""
        return not self.total_batches or self._begins_at < self.total_batches or self.has_trained

    @property
    def stage(self) -> Stage:
        """The current stage: the latest to begin, but an upload only if nothing else runs."""
        stages = list(self._running.values())
        return next(
            (stage for stage in reversed(stages) if stage.name != UPLOAD),
            stages[-1] if stages else self._waiting,
        )

    @property
    def uploads(self) -> list[Stage]:
        """The running uploads, without the current stage."""
        current = self.stage
        stages = list(self._running.values())
        return [stage for stage in stages if stage.name == UPLOAD and stage is not current]

    @property
    def batches_per_second(self) -> float | None:
        """The speed in the last seconds of train-workloads; None if unknown."""
        points = list(self._speed_points)
        if len(points) < 2:
            return None
        (began, first), (now, last) = points[0], points[-1]
        return (last - first) / (now - began)

    @property
    def throughput(self) -> Throughput:
        """The throughput in the last seconds of train-workloads; before, the last workload's.

        Samples, tokens and operations are counted when a workload has ended: until then, a batch
        has as many as in the last workload, and in the first one `batch_samples`.
        """
        speed, last = self.batches_per_second, self.last_throughput
        if speed is None:
            return last
        if not last.batches_per_second:
            last = Throughput(1.0, self.batch_samples or None)
        return last.at(speed)

    @property
    def seconds_left(self) -> float | None:
        """Estimated time left, from the average speed of the run with all its stages."""
        trained = self.batches - self._begins_at
        if trained <= 0 or self.batches >= self.total_batches:
            return None
        seconds_a_batch = (self._clock() - self._began) / trained
        return (self.total_batches - self.batches) * seconds_a_batch

    def running(self, name: str, detail: str) -> Stage | None:
        return self._running.get((name, detail))

    def seconds_in(self, stage: Stage) -> float:
        return self._clock() - stage.began

    def _note_speed(self, trained_seconds: float) -> None:
        points = self._speed_points
        if points and (trained_seconds <= points[-1][0] or self.batches <= points[-1][1]):
            return
        # Without this, workloads of a millisecond would fill the window with points.
        if len(points) > 1 and trained_seconds - points[-2][0] < SPEED_STEP_SECONDS:
            points.pop()
        points.append((trained_seconds, self.batches))
        while len(points) > 2 and trained_seconds - points[1][0] >= SPEED_WINDOW_SECONDS:
            points.popleft()
