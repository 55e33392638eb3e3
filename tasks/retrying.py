"""Which failed stages Prefect retries: storage failures, while the ranks stay warm."""

from __future__ import annotations

from typing import Any

from prefect.cache_policies import NO_CACHE
from prefect.context import TaskRunContext

from trial_core.driver.run import Launch
from trial_core.errors import StorageError

STORAGE_RETRIES = 2
STORAGE_RETRY_SECONDS = 5


def storage_failed(task: Any, task_run: Any, state: Any) -> bool:
    """Return whether to retry a stage: a `retry_condition_fn` for Prefect.

    Other errors would happen again. A retry must also begin before a stopping run has to end.
    """
    if not isinstance(state.data, StorageError):
        return False
    context = TaskRunContext.get()
    launch = context.parameters.get("launch") if context else None
    if not isinstance(launch, Launch):
        return True
    left = launch.run.stopping.seconds_left
    return left is None or left > STORAGE_RETRY_SECONDS


TRANSFER: dict[str, Any] = {
    "cache_policy": NO_CACHE,
    "retries": STORAGE_RETRIES,
    "retry_delay_seconds": STORAGE_RETRY_SECONDS,
    "retry_condition_fn": storage_failed,
}
"""Options of every task that moves data to or from the storage."""
