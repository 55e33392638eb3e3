"""The trace of a trial: its attempts, their launches, and the stages of each.

All attempts at a trial (its runs) have one trace, whose id is derived from the trial's id::

    attempt (1)                     the root; its span id is derived, too
    ├── launch                      the ranks; again after a restart or a move
    │   ├── build-trial
    │   ├── train-workload          [0→100]
    │   ├── checkpoint-save         @100
    │   ├── checkpoint-upload       @100, in parallel with the next train-workload
    │   └── …
    └── attempt (2)                 resumed
        └── launch

A span is sent when it ends, so a killed driver sends no attempt. If the first attempt was killed,
the second sends the root in its place: without a root, backends show a trace that never ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from opentelemetry import trace
from opentelemetry.sdk.trace import Tracer
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from trial_core.checkpoint.json_objects import parse_time
from trial_core.checkpoint.manifest import Topology
from trial_core.common import text_format
from trial_core.errors import Stopped
from trial_core.observe.events.observers import Observer, WorkloadTimes
from trial_core.observe.events.run_status import UPLOAD
from trial_core.observe.ledger.time_ledger import RunTime
from trial_core.schedule.stop_requests import StopHandler

MAX_REASON = 2000
ATTEMPT = "attempt"


class DerivedIds(IdGenerator):
    """Derives the ids of a trace and its root span from the trial's id; `others` makes the rest."""

    def __init__(self, trial: str, others: IdGenerator) -> None:
        self._trace_id, self._root_id = derived_ids(trial)
        self._others = others
        self._is_root_next = False

    def generate_trace_id(self) -> int:
        """Called for a root, before its `generate_span_id`."""
        self._is_root_next = True
        return self._trace_id

    def generate_span_id(self) -> int:
        """The derived id after `generate_trace_id`, else any."""
        is_root, self._is_root_next = self._is_root_next, False
        return self._root_id if is_root else self._others.generate_span_id()


def derived_ids(trial: str) -> tuple[int, int]:
    """The ids of a trial's trace and of the span of its first attempt."""
    digest = hashlib.sha256(f"trialflow {trial}".encode()).digest()
    return int.from_bytes(digest[:16], "big"), int.from_bytes(digest[16:24], "big")


class RunTrace(Observer):
    """Makes the spans of a run."""

    def __init__(
        self, provider: trace.TracerProvider, experiment: str, trial: str, stopping: StopHandler
    ) -> None:
        # The attribute makes it a tracer of this trial alone, whose ids can be set.
        self._tracer = provider.get_tracer("trialflow", attributes={"trialflow.trial": trial})
        if isinstance(self._tracer, Tracer):
            self._tracer.id_generator = DerivedIds(trial, self._tracer.id_generator)
        self._attributes = {"trialflow.trial": trial, "trialflow.experiment": experiment}
        self._trial = trial
        self._stopping = stopping
        self._attempt: Span = trace.INVALID_SPAN
        self._launch: Span = trace.INVALID_SPAN
        self._is_built = False
        self._batches = 0
        self._open: dict[tuple[str, str], Span] = {}

    def end(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """End the attempt, as an `__exit__` of the run's block."""
        request = self._stopping.request
        if request is not None:
            self._attempt.set_attribute("trialflow.stop_reason", str(request))
        self._attempt.set_attribute("trialflow.batches", self._batches)
        failure = error if isinstance(error, Exception) and not isinstance(error, Stopped) else None
        if failure is not None:
            self._attempt.set_attribute("error.type", type(failure).__name__)
        status = None if failure is None else _failed(str(failure))
        self._end_launch(status)
        _end(self._attempt, status)

    def trial_owned(self, attempt: int, earlier: Sequence[RunTime] = ()) -> None:
        if attempt == 2:
            for run in earlier:
                if not run.is_over:
                    self._send_killed(run)
        around = trace.get_current_span().get_span_context()
        self._attempt = self._tracer.start_span(
            ATTEMPT,
            context=trace.set_span_in_context(trace.INVALID_SPAN if attempt == 1 else self._root()),
            attributes={**self._attributes, "trialflow.attempt": attempt},
            links=[Link(around)] if around.is_valid else (),
        )
        self._start_launch()

    def run_started(
        self, trial: str, total_batches: int, begins_at: int, batch_samples: int
    ) -> None:
        self._batches = begins_at
        self._attempt.set_attribute("trialflow.batches.total", total_batches)
        self._launch.set_attribute("trialflow.batches.begin", begins_at)

    def trial_built(self, topology: Topology, versions: Mapping[str, str], code: str) -> None:
        self._launch.set_attribute("trialflow.ranks", topology.world_size)
        if code:
            self._attempt.set_attribute("trialflow.code", code)

    def ranks_placed(self, nodes: Sequence[str]) -> None:
        self._launch.set_attribute("trialflow.nodes", len(set(nodes)))

    def stage_started(self, stage: str, detail: str) -> None:
        if stage == "build-trial":
            if self._is_built:  # launched again without a restart: with smaller micro-batches
                self._launch_again(None)
            self._is_built = True
        if (again := self._open.pop((stage, detail), None)) is not None:
            _end(again, _failed("failed, and is tried again"))
        of_stage = {"trialflow.stage.detail": detail} if detail else {}
        self._open[stage, detail] = self._tracer.start_span(
            stage,
            context=trace.set_span_in_context(self._launch),
            attributes={**self._attributes, **of_stage},
        )

    def stage_ended(self, stage: str, detail: str, seconds: float) -> None:
        if (span := self._open.pop((stage, detail), None)) is not None:
            span.end()

    def stage_failed(self, stage: str, detail: str) -> None:
        if (span := self._open.pop((stage, detail), None)) is not None:
            _end(span, _failed("failed"))

    def notice(self, text: str) -> None:
        _add(self._attempt, "notice", text=text)

    def batches_trained(self, batches: int) -> None:
        self._batches = batches

    def training_timed(self, timed: WorkloadTimes) -> None:
        self._batches = timed.reached

    def checkpoint_committed(
        self, uuid: str, batches: int, total_bytes: int, digest: str = ""
    ) -> None:
        upload = self._open.get((UPLOAD, f"@{batches}"), self._attempt)
        _add(upload, "checkpoint committed", uuid=uuid, batches=batches, bytes=total_bytes)

    def moving(self, what: str) -> None:
        _add(self._attempt, "move", reason=what)
        self._launch_again(None)

    def stalled(self, during: str, seconds: float, reason: str) -> None:
        _add(self._attempt, "stall", stage=during, seconds=seconds, reason=reason)

    def restarting(self, reason: str, attempt: int, max_restarts: int) -> None:
        _add(
            self._attempt, "restart",
            restart=attempt, max_restarts=max_restarts, batches=self._batches, reason=reason,
        )  # fmt: skip
        self._launch_again(_failed(reason))

    def _send_killed(self, first: RunTime) -> None:
        """Send the span of a first attempt whose driver was killed, as far as it is known. A driver
        that only seemed dead sends its own later, with the same id."""
        began, until = (_nanoseconds(each) for each in (first.began_at, first.until))
        root = self._tracer.start_span(
            ATTEMPT,
            context=trace.set_span_in_context(trace.INVALID_SPAN),
            attributes={**self._attributes, "trialflow.attempt": first.number},
            start_time=began,
        )
        root.set_status(_failed("its driver was killed, or its machine was lost"))
        root.end(until)

    def _root(self) -> Span:
        """The first attempt's span, which another process has made."""
        trace_id, span_id = derived_ids(self._trial)
        is_sampled = True
        if isinstance(self._tracer, Tracer):  # as it has been then
            sampled = self._tracer.sampler.should_sample(None, trace_id, ATTEMPT)
            is_sampled = sampled.decision is Decision.RECORD_AND_SAMPLE
        flags = TraceFlags(TraceFlags.SAMPLED if is_sampled else TraceFlags.DEFAULT)
        return NonRecordingSpan(SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags))

    def _start_launch(self) -> None:
        self._is_built = False
        context = trace.set_span_in_context(self._attempt)
        self._launch = self._tracer.start_span(
            "launch", context=context, attributes=self._attributes
        )

    def _launch_again(self, status: Status | None) -> None:
        self._end_launch(status)
        self._start_launch()

    def _end_launch(self, status: Status | None) -> None:
        """End the launch, and the stages that have not succeeded; uploads are over by now."""
        for span in list(self._open.values()):
            _end(span, status)
        self._open.clear()
        _end(self._launch, status)


def _nanoseconds(at: str) -> int | None:
    moment = parse_time(at)
    return None if moment is None else int(moment.timestamp() * 1e6) * 1000


def _failed(reason: str) -> Status:
    return Status(StatusCode.ERROR, text_format.shortened(reason, MAX_REASON))


def _add(span: Span, event: str, **facts: str | float) -> None:
    short = {
        name: text_format.shortened(fact, MAX_REASON) if isinstance(fact, str) else fact
        for name, fact in facts.items()
    }
    span.add_event(event, {f"trialflow.{name}": fact for name, fact in short.items()})


def _end(span: Span, status: Status | None) -> None:
    if status is not None:
        span.set_status(status)
    span.end()
