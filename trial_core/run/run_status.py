"""What a run has told so far, and what follows from it: its speed, and the time left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trial_core.run.observer import MetricsKind, Observer

TRAINING = "train-workload"
UPLOAD = "checkpoint-upload"

# Long enough to be steady, short enough to notice a change.
SPEED_WINDOW_SECONDS = 10.0
SPEED_STEP_SECONDS = 0.05


@dataclass(frozen=True)
class Stage:
    """A stage that is under way.

    Attributes:
        began: when, by the run's clock.
    """

    name: str
    detail: str
    began: float

    def __str__(self) -> str:
        return f"{self.name} {self.detail}".rstrip()


class RunStatus(Observer):
    """Remembers what the run tells. Whoever overrides a method calls this one first.

    Attributes:
        trial: the trial's id; None until its loaders are built.
        batches, total_batches: trained so far, and where training ends.
        batch_samples: samples in one batch.
        training, validation: the last metrics of each kind.
        validated_at: batches trained at the last validation.
        committed_at: batches trained at the last checkpoint; None before any.
        has_trained: whether this run has trained a batch.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.trial: str | None = None
        self.batches = 0
        self.total_batches = 0
        self.batch_samples = 0
        self.training: Mapping[str, Any] = {}
        self.validation: Mapping[str, Any] = {}
        self.validated_at: int | None = None
        self.committed_at: int | None = None
        self.has_trained = False
        self._begins_at = 0
        self._began = clock()
        self._running: dict[tuple[str, str], Stage] = {}
        self._waiting = Stage("starting", "", clock())
        # Seconds spent in train-workloads, and batches trained by then.
        self._reached: deque[tuple[float, int]] = deque()
        self._trained_seconds = 0.0
        self._workload_began: float | None = None

    # ---------------------------------------------------------------------- what it is told

    def waiting_for(self, what: str) -> None:
        """Until the first stage begins, and between stages, the run waits for `what`."""
        self._waiting = Stage(what, "", self._clock())

    def run_started(
        self, trial: str, total_batches: int, begins_at: int, batch_samples: int
    ) -> None:
        self.trial, self.total_batches, self.batch_samples = trial, total_batches, batch_samples
        self.batches = self._begins_at = begins_at
        # A rank may have died between the commit and our hearing of it.
        self.committed_at = begins_at or None
        self._began = self._clock()
        self._reached = deque([(self._trained_seconds, begins_at)])

    def stage_started(self, stage: str, detail: str) -> None:
        now = self._clock()
        self._running[stage, detail] = Stage(stage, detail, now)
        if stage == TRAINING:
            self._workload_began = now

    def stage_ended(self, stage: str, detail: str, seconds: float) -> None:
        self._running.pop((stage, detail), None)
        is_over = bool(self.total_batches) and self.batches >= self.total_batches
        self._waiting = Stage("ending" if is_over else "waiting", "", self._clock())
        if stage == TRAINING:
            self._workload_began = None
            self._trained_seconds += seconds

    def batches_trained(self, batches: int) -> None:
        self.batches = max(self.batches, batches)
        self.has_trained = True
        began = self._workload_began
        if began is not None:
            self._note_speed(self._trained_seconds + self._clock() - began)

    def metrics_reported(self, kind: MetricsKind, batches: int, metrics: Mapping[str, Any]) -> None:
        self.batches = max(self.batches, batches)
        if kind == "training":
            self.training = metrics
            self.has_trained = True
            self._note_speed(self._trained_seconds)
        else:
            self.validation, self.validated_at = metrics, batches

    def checkpoint_committed(self, uuid: str, batches: int, total_bytes: int) -> None:
        self.committed_at = batches

    def restarting(self, reason: str, attempt: int, max_restarts: int) -> None:
        self._running.clear()
        self.waiting_for("starting the ranks again")

    # --------------------------------------------------------------------- what follows

    @property
    def stage(self) -> Stage:
        """What the run does now: the stage that began last, an upload only if nothing else."""
        stages = list(self._running.values())
        return next(
            (stage for stage in reversed(stages) if stage.name != UPLOAD),
            stages[-1] if stages else self._waiting,
        )

    @property
    def uploads(self) -> list[Stage]:
        """Uploads under way beside the stage."""
        current = self.stage
        stages = list(self._running.values())
        return [stage for stage in stages if stage.name == UPLOAD and stage is not current]

    @property
    def samples_per_second(self) -> float | None:
        """Speed over the last seconds spent in train-workloads; None before any batch."""
        points = list(self._reached)
        if len(points) < 2:
            return None
        (began, first), (now, last) = points[0], points[-1]
        return (last - first) * self.batch_samples / (now - began)

    @property
    def seconds_left(self) -> float | None:
        """How long the run still takes if it goes on as so far, all stages included."""
        trained = self.batches - self._begins_at
        if trained <= 0 or self.batches >= self.total_batches:
            return None
        seconds_a_batch = (self._clock() - self._began) / trained
        return (self.total_batches - self.batches) * seconds_a_batch

    def running(self, name: str, detail: str) -> Stage | None:
        """That stage, if it is under way."""
        return self._running.get((name, detail))

    def seconds_in(self, stage: Stage) -> float:
        """How long a stage has been going on."""
        return self._clock() - stage.began

    def _note_speed(self, trained_seconds: float) -> None:
        reached = self._reached
        if reached and (trained_seconds <= reached[-1][0] or self.batches <= reached[-1][1]):
            return
        # Workloads of a millisecond would fill the window with points that nobody can tell apart.
        if len(reached) > 1 and trained_seconds - reached[-2][0] < SPEED_STEP_SECONDS:
            reached.pop()
        reached.append((trained_seconds, self.batches))
        while len(reached) > 2 and trained_seconds - reached[1][0] >= SPEED_WINDOW_SECONDS:
            reached.popleft()
