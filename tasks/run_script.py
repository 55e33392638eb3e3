"""run-script: lets a Core API script run until it stores a checkpoint, or ends."""

from __future__ import annotations

import threading

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from trial_core.errors import SlotsError
from trial_core.messages import (
    CheckpointWritten,
    MetricsReported,
    RunScript,
    ScriptEnded,
    ScriptEvent,
)
from trial_core.run.script_progress import ScriptProgress
from trial_core.text_format import metrics_line
from trialflow.tasks.result_memory import forget_results
from trialflow.tasks.trial_run import TrialRun


class RunningScript:
    """A script that runs on all ranks."""

    def __init__(self, run: TrialRun, request: RunScript) -> None:
        self._run = run
        self._request = request
        self._happened = run.script_events
        self._thread = threading.Thread(target=self._wait, name="run-script", daemon=True)

    def start(self) -> None:
        """Start the script. Returns at once."""
        self._thread.start()

    def next_event(self) -> ScriptEvent | list[ScriptEnded]:
        """Wait for what the script does next: its rank 0 reports, or all ranks have ended.

        Raises:
            RankFailed: the script raised, or exited with another code than 0.
            Stalled, Stopped: as for any request.
        """
        event: ScriptEvent | list[ScriptEnded] | SlotsError = self._happened.get()
        if isinstance(event, SlotsError):
            raise event
        return event

    def _wait(self) -> None:
        stall_seconds = self._run.config.stopping.idle_timeout_seconds
        try:
            ended = self._run.slots.request(self._request, ScriptEnded, stall_seconds=stall_seconds)
        except SlotsError as error:
            self._happened.put(error)
        else:
            self._happened.put(ended)


@task(name="run-script", task_run_name="run-script [{begin}→]", cache_policy=NO_CACHE)
def run_script(
    run: TrialRun, script: RunningScript, progress: ScriptProgress, begin: int
) -> CheckpointWritten | list[ScriptEnded]:
    """Let the script run on from step `begin`, and note what it reports.

    Returns:
        The checkpoint that it has written, which it waits for; or how it ended on each rank.
    """
    forget_results()
    with run.stage("run-script", f"[{begin}→]"):
        while isinstance(event := script.next_event(), MetricsReported):
            _note(run, progress, event)
        if isinstance(event, CheckpointWritten):
            run.clock.batches_trained(event.steps_completed)
    return event


def _note(run: TrialRun, progress: ScriptProgress, event: MetricsReported) -> None:
    kind, steps, metrics = event.kind, event.steps_completed, event.metrics
    mistake = progress.reported(kind, steps, metrics)
    run.has_trained = run.has_trained or steps > run.batches_trained
    run.batches_trained = steps
    run.clock.batches_trained(steps)
    get_run_logger().info("%s metrics at %d: %s", kind, steps, metrics_line(metrics))
    run.observer.metrics_reported(kind, steps, metrics)
    if mistake is not None:
        get_run_logger().warning("no checkpoint counts as the best: %s", mistake)
