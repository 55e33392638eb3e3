"""callbacks: calls one hook of the callbacks, so that the run shows how long each hook takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trial_core.driver.run import Launch
from trial_core.driver.stages.declared_stage import stage
from trial_core.messages import HookDone, RunHook
from trial_core.observe.ledger.run_clock import Bucket

_BUCKETS: Mapping[str, Bucket] = {
    "on_trial_startup": "build",
    "on_training_start": "build",
    "on_training_workload_end": "train",
    "on_validation_end": "validate",
    "on_checkpoint_write_end": "checkpoint_stall",
    "on_checkpoint_end": "checkpoint_stall",
    "on_checkpoint_upload_end": "checkpoint_stall",
}
"""The bucket of the stage that a hook follows; the time of other hooks is idle."""


@stage("callbacks", "{hook} @{batches_trained}", bucket=lambda given: _BUCKETS.get(given["hook"]))
def callbacks(launch: Launch, hook: str, batches_trained: int, arguments: dict[str, Any]) -> None:
    """Call one hook of every callback, on every rank, with the arguments that the driver knows.

    `call_hook` knows whether there are any. After on_validation_end, `RankAnswers.validated` has
    the metrics as the callbacks have left them.
    """
    results = launch.ask(RunHook(hook=hook, arguments=arguments), HookDone)
    launch.note_stop_requests(results)
    if results[0].metrics is not None:
        launch.answers.validated = results[0].metrics


def call_hook(launch: Launch, hook: str, batches_trained: int, **arguments: Any) -> None:
    """Call one hook of every callback, if any callback of the trial overrides it."""
    if hook in launch.answers.hooks:
        callbacks(launch, hook, batches_trained, arguments)
