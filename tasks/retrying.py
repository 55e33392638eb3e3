"""When a stage is tried again: the storage failed, and the ranks are still there, warm."""

from __future__ import annotations

from typing import Any

from prefect.context import TaskRunContext

from trial_core.errors import StorageError
from trialflow.tasks.run import TrialRun

STORAGE_RETRIES = 2
STORAGE_RETRY_SECONDS = 5


def storage_failed(task: Any, task_run: Any, state: Any) -> bool:
    """A `retry_condition_fn` of Prefect's. Whatever else fails would fail again; and a run that is
    to end before the retry has begun would end later for it."""
    return isinstance(state.data, StorageError) and _is_there_time()


def _is_there_time() -> bool:
    context = TaskRunContext.get()
    run = context.parameters.get("run") if context else None
    if not isinstance(run, TrialRun):
        return True
    left = run.stopping.seconds_left
    return left is None or left > STORAGE_RETRY_SECONDS
