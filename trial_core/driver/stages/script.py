"""run-script: lets a script run until it stores a checkpoint, calls `Trainer.fit`, or ends."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from trial_core.common.text_format import metrics_line, shortened
from trial_core.driver.run import Launch, Run
from trial_core.driver.stages.declared_stage import stage
from trial_core.errors import SlotsError, TrialError
from trial_core.messages import (
    CheckpointWritten,
    FitBegun,
    MetricsReported,
    RunScript,
    ScriptEnded,
    ScriptEvent,
    SettingsRestored,
)
from trial_core.schedule.sequencer import Progress, searcher_metric
from trial_core.schedule.units import Batch

REMEMBERED = 1000
"""The reports of which another rank's copy is noticed: ranks may be some steps behind others."""

Values = dict[str, int]
"""The hash of each metric's value: values may be large."""


@dataclass
class ScriptReports:
    """The progress of a Core API script, in steps for batches, and its last metrics of each kind.

    Any rank may report. A report of another rank than 0 may come late, after those of later steps.
    Rank 0's cannot: the script has gone back to an earlier step.
    """

    metric: str | None
    smaller_is_better: bool
    progress: Progress = field(default_factory=Progress)
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    _first: dict[tuple[str, str, int], tuple[int, Values]] = field(default_factory=dict)
    _metrics_at: dict[str, int] = field(default_factory=dict)
    _stored_at: int = -1
    _warned: set[str] = field(default_factory=set)

    def counts(self, report: MetricsReported) -> bool:
        """Note a report. Return False if another rank has reported the same of this step.

        A rank may report a step again, and replaces its metrics. Raises TrialError if another rank
        has reported something else: which one comes first is chance.
        """
        step = report.kind, report.group, report.steps_completed
        values = {name: hash(msgspec.msgpack.encode(it)) for name, it in report.metrics.items()}
        rank, known = self._first.get(step, (report.rank, values))
        if rank == report.rank:
            self._first[step] = rank, values
            if len(self._first) > REMEMBERED:
                del self._first[next(iter(self._first))]
            return True
        if values == known:
            return False
        name = next(name for name in {**values, **known} if values.get(name) != known.get(name))
        here = shortened(repr(report.metrics[name]), 80) if name in values else "missing"
        raise TrialError(
            f"rank {rank} and rank {report.rank} have both reported {report.title}, and not the "
            f'same: "{name}" is {here} on rank {report.rank}; reduce the metrics over the ranks, '
            "and report them on one rank (if context.distributed.rank == 0)"
        )

    def reported(self, report: MetricsReported) -> list[str]:
        """Note a report. Return warnings, each once."""
        kind, steps, reached = report.kind, report.steps_completed, self.progress.batches_trained
        last = self._metrics_at.get(kind)
        if report.rank == 0 or last is None or steps >= last:
            # Groups of training metrics may come from several ranks, in any order.
            others = self.metrics[kind] if kind == "training" and steps == last else {}
            self.metrics[kind] = {**others, **report.metrics}
            self._metrics_at[kind] = steps
        self.progress = self.progress.after_training(steps)
        warnings = self._validated(report) if kind == "validation" else []
        if report.rank != 0:
            self.progress = self.progress.after_training(max(steps, reached))
        return warnings

    def repeated(self, report: MetricsReported) -> list[str]:
        """Return the warning, once, that a report does not count."""
        return self._once(
            "repeated",
            f"several ranks report the same metrics ({report.title}), which count once: report "
            "them on one rank; another rank than 0 waits for the driver each time",
        )

    def stored(self, steps_completed: int) -> Progress:
        """Note a checkpoint. Return the progress there."""
        self._stored_at = steps_completed
        self.progress = self.progress.after_training(steps_completed).after_checkpoint()
        return self.progress

    def _validated(self, report: MetricsReported) -> list[str]:
        value, steps, warnings = None, report.steps_completed, []
        if self.metric is not None:
            try:
                value = searcher_metric(report.metrics, self.metric)
            except TrialError as error:
                warnings += self._once("metric", f"no checkpoint counts as the best: {error}")
        self.progress = self.progress.after_validation(value, self.smaller_is_better)
        if report.rank != 0 and steps <= self._stored_at:
            warnings += self._once(
                "order",
                f"the checkpoint at {self._stored_at} does not have the {report.title}, because "
                f"rank {report.rank} reported them later: report first, and let all ranks meet "
                "(context.distributed.allgather(None)) before rank 0 stores",
            )
        return warnings

    def _once(self, what: str, warning: str) -> list[str]:
        if what in self._warned:
            return []
        self._warned.add(what)
        return [warning]


class UploadEnded:
    """Event: an upload that the script did not wait for has ended."""


WhatHappened = CheckpointWritten | FitBegun | SettingsRestored | UploadEnded | list[ScriptEnded]
"""An event that `run_script` ends with: mostly one that the script waits for."""

_NOT_TRAINED = (FitBegun, SettingsRestored, UploadEnded)
"""Events after which a test of the script goes on."""


class RunningScript:
    """A script that begins with this object, and its events."""

    def __init__(self, launch: Launch, request: RunScript) -> None:
        self._launch = launch
        self._request = request
        self._happened = launch.script_events
        threading.Thread(target=self._wait, name="run-script", daemon=True).start()

    def next_event(self) -> ScriptEvent | UploadEnded | list[ScriptEnded]:
        """Wait for the script's next event: a report, or the end of all ranks.

        Raises RankFailed if the script raised, or exited with another code than 0; and as any
        request.
        """
        event: ScriptEvent | UploadEnded | list[ScriptEnded] | SlotsError = self._happened.get()
        if isinstance(event, SlotsError):
            raise event
        if self._launch.run.test_mode and not isinstance(event, _NOT_TRAINED):
            self._launch.slots.stop()  # a test needs only one event
        return event

    def _wait(self) -> None:
        try:
            self._happened.put(self._launch.ask(self._request, ScriptEnded))
        except SlotsError as error:
            self._happened.put(error)


@stage("run-script", "[{begin}→]", bucket="train")
def run_script(
    launch: Launch, script: RunningScript, progress: ScriptReports, begin: int
) -> WhatHappened:
    """Let the script run on from step `begin`, and note its metrics.

    Returns:
        The checkpoint that it has written, or the fit that it has begun, for which it waits; the
        settings that it has restored; the end of an upload; or how the script ended on each rank.
    """
    began = time.monotonic()
    while isinstance(event := script.next_event(), MetricsReported):
        _note(launch, progress, event)
    if isinstance(event, CheckpointWritten):
        launch.run.clock.batches_trained(event.steps_completed)
    elif isinstance(event, FitBegun):  # so far the script has constructed its trial
        launch.run.clock.count_as("build", time.monotonic() - began)
    return event


def _note(launch: Launch, progress: ScriptReports, event: MetricsReported) -> None:
    run, at = launch.run, launch.status
    kind, steps, metrics, losses = event.kind, event.steps_completed, event.metrics, launch.losses
    if launch.world_size > 1 and not progress.counts(event):
        launch.warn(progress.repeated(event))
        return
    warnings = progress.reported(event)
    if kind == "training":
        launch.warn(losses.trained(losses.reached or at.batches_trained, steps, metrics))
    else:
        launch.warn(losses.validated(steps, metrics, progress.metric))
    at.has_trained = at.has_trained or steps > at.batches_trained
    at.batches_trained = progress.progress.batches_trained
    run.clock.batches_trained(at.batches_trained)
    run.logger.info("%s metrics at %d: %s", kind, steps, metrics_line(metrics))
    if event.steps and event.seconds > 0:
        work = event.work.times(event.steps)
        now, whole_run = run.throughput.measured(
            event.steps, event.seconds, work, [event.device] * launch.world_size
        )
        run.observer.throughput_measured(steps, now, whole_run)
    run.observer.metrics_reported(kind, steps, metrics)
    launch.warn(warnings)
    if kind == "validation" and _pauses(run, steps):
        launch.slots.stop()  # the script learns it from should_preempt, if not from operations()
    if (failure := losses.failure(is_last=False, saved_at=at.saved_at)) is not None:
        raise failure


def _pauses(run: Run, steps: int) -> bool:
    """Return whether a script that counts batches has reached the length at which it is to wait."""
    pause = run.pause_at
    return isinstance(pause, Batch) and isinstance(pause.value, int) and steps >= pause.value
