"""callbacks: one stage per hook, so that the run shows how long each hook takes."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from trial_core.messages import HookDone, RunHook
from trialflow.tasks.trial_run import TrialRun


def run_callbacks(run: TrialRun, hook: str, batches_trained: int, **arguments: Any) -> None:
    """Run `hook` of every callback as a stage. No stage runs if no callback overrides it.

    After on_validation_end, `run.validated` holds the metrics as the callbacks have left them.

    Args:
        arguments: those of the hook's arguments that the driver knows; the ranks add the rest.
    """
    if hook in run.hooks:
        callbacks(run, hook, batches_trained, arguments)


@task(
    name="callbacks",
    task_run_name="callbacks {hook} @{batches_trained}",
    cache_policy=NO_CACHE,
)
def callbacks(run: TrialRun, hook: str, batches_trained: int, arguments: dict[str, Any]) -> None:
    """Call one hook of every callback, on every rank."""
    with run.stage("callbacks", f"{hook} @{batches_trained}"):
        stall_seconds = run.config.stopping.idle_timeout_seconds
        request = RunHook(hook=hook, arguments=arguments)
        results = run.slots.request(request, HookDone, stall_seconds=stall_seconds)
    run.stop_requested |= any(result.stop_requested for result in results)
    if results[0].metrics is not None:
        run.validated = results[0].metrics
