"""callbacks: the trial's own hooks, each a stage of its own so that people see what they cost."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from trial_core.messages import HookDone, RunHook
from trialflow.tasks.run import TrialRun


def run_callbacks(run: TrialRun, hook: str, batches_trained: int, **arguments: Any) -> None:
    """Run `hook` of every callback, as a stage; no stage at all when none overrides it.

    Args:
        arguments: what the driver knows of the hook's arguments; the ranks know the rest.
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
