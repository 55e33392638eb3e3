"""run-script: lets a script run until it stores a checkpoint, calls `Trainer.fit`, or ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trial_core.common.text_format import metrics_line
from trial_core.driver.run import Launch
from trial_core.driver.stages.declared_stage import stage
from trial_core.errors import SlotsError, TrialError
from trial_core.messages import (
    CheckpointWritten,
    FitBegun,
    MetricsKind,
    MetricsReported,
    RunScript,
    ScriptEnded,
    ScriptEvent,
)
from trial_core.schedule.sequencer import Progress, searcher_metric


@dataclass
class ScriptReports:
    """The progress of a Core API script, in steps for batches, and its last metrics of each kind.

    Attributes:
        has_warned: True after the warning that the script does not report the searcher metric.
    """

    metric: str | None
    smaller_is_better: bool
    progress: Progress = field(default_factory=Progress)
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    has_warned: bool = False

    def reported(
        self, kind: MetricsKind, steps_completed: int, metrics: Mapping[str, Any]
    ) -> TrialError | None:
        """Note a report. Return the error if a validation lacks the searcher metric."""
        self.progress = self.progress.after_training(steps_completed)
        self.metrics[kind] = dict(metrics)
        if kind == "training":
            return None
        value = mistake = None
        if self.metric is not None:
            try:
                value = searcher_metric(metrics, self.metric)
            except TrialError as error:
                mistake = error
        self.progress = self.progress.after_validation(value, self.smaller_is_better)
        return mistake

    def stored(self, steps_completed: int) -> Progress:
        """Note a checkpoint. Return the progress there."""
        self.progress = self.progress.after_training(steps_completed).after_checkpoint()
        return self.progress


class UploadEnded:
    """Event: an upload that the script did not wait for has ended."""


WhatHappened = CheckpointWritten | FitBegun | UploadEnded | list[ScriptEnded]
"""An event that `run_script` ends with: mostly one that the script waits for."""


class RunningScript:
    """A script that runs on all ranks."""

    def __init__(self, launch: Launch, request: RunScript) -> None:
        self._launch = launch
        self._request = request
        self._happened = launch.script_events
        self._thread = threading.Thread(target=self._wait, name="run-script", daemon=True)

    def start(self) -> None:
        """Start the script. Returns at once."""
        self._thread.start()

    def next_event(self) -> ScriptEvent | UploadEnded | list[ScriptEnded]:
        """Wait for the script's next event: a report of its rank 0, or the end of all ranks.

        Raises:
            RankFailed: the script raised, or exited with another code than 0.
            Stalled, Stopped: as for any request.
        """
        event: ScriptEvent | UploadEnded | list[ScriptEnded] | SlotsError = self._happened.get()
        if isinstance(event, SlotsError):
            raise event
        if self._launch.run.test_mode and not isinstance(event, (FitBegun, UploadEnded)):
            self._launch.slots.stop()  # a test needs only one event
        return event

    def _wait(self) -> None:
        try:
            self._happened.put(self._launch.ask(self._request, ScriptEnded))
        except SlotsError as error:
            self._happened.put(error)


@stage("run-script", "[{begin}→]")
def run_script(
    launch: Launch, script: RunningScript, progress: ScriptReports, begin: int
) -> WhatHappened:
    """Let the script run on from step `begin`, and note its metrics.

    Returns:
        The checkpoint that it has written, or the fit that it has begun, for which it waits; the
        end of an upload; or how the script ended on each rank.
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
    kind, steps, metrics = event.kind, event.steps_completed, event.metrics
    mistake, losses = progress.reported(kind, steps, metrics), launch.losses
    if kind == "training":
        launch.warn(losses.trained(losses.reached or at.batches_trained, steps, metrics))
    else:
        launch.warn(losses.validated(steps, metrics, progress.metric))
    at.has_trained = at.has_trained or steps > at.batches_trained
    at.batches_trained = steps
    run.clock.batches_trained(steps)
    run.logger.info("%s metrics at %d: %s", kind, steps, metrics_line(metrics))
    if event.steps and event.seconds > 0:
        now, whole_run = run.throughput.measured(
            event.steps, event.seconds, event.work, [event.device] * launch.world_size
        )
        run.observer.throughput_measured(steps, now, whole_run)
    run.observer.metrics_reported(kind, steps, metrics)
    if mistake is not None and not progress.has_warned:
        progress.has_warned = True
        launch.warn([f"no checkpoint counts as the best: {mistake}"])
    if (failure := losses.failure(is_last=False, saved_at=at.saved_at)) is not None:
        raise failure
