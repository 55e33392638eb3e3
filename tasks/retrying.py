"""When a stage is tried again: the storage failed, and the ranks are still there, warm."""

from __future__ import annotations

from typing import Any

from trial_core.errors import StorageError

STORAGE_RETRIES = 2
STORAGE_RETRY_SECONDS = 5


def storage_failed(task: Any, task_run: Any, state: Any) -> bool:
    """A `retry_condition_fn` of Prefect's. Whatever else fails would fail again."""
    return isinstance(state.data, StorageError)
