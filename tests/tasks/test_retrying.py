"""Which failed stages are retried."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.context import TaskRunContext

from tests.support.slots import toy_config
from trial_core.checkpoint.store import CheckpointStore
from trial_core.config import ExperimentConfig
from trial_core.driver.run import Launch, Run
from trial_core.errors import CheckpointError, StorageError
from trial_core.schedule.stop_requests import StopHandler
from trialflow.tasks.retrying import STORAGE_RETRY_SECONDS, storage_failed

FAILED = SimpleNamespace(data=StorageError("503 SlowDown"))


@contextmanager
def stage_of(launch: Launch) -> Iterator[None]:
    """As in a running task with the parameter `launch`."""
    with pytest.MonkeyPatch.context() as patch:
        context: Any = SimpleNamespace(parameters={"launch": launch})
        patch.setattr(TaskRunContext, "get", classmethod(lambda cls: context))
        yield


def run_of(config: ExperimentConfig, folder: Path, stopping: StopHandler) -> Launch:
    store = CheckpointStore(config.checkpoint_storage.url)
    return Launch(Run(config, "trial", folder, store, stopping=stopping))


def test_only_storage_failures_are_retried() -> None:
    """Other errors would happen again."""
    assert storage_failed(None, None, FAILED)
    assert not storage_failed(None, None, SimpleNamespace(data=CheckpointError("two files")))
    assert not storage_failed(None, None, SimpleNamespace(data=None))


@pytest.mark.parametrize(
    ("grace", "is_retried"),
    [(STORAGE_RETRY_SECONDS / 2, False), (100 * STORAGE_RETRY_SECONDS, True)],
)
def test_a_retry_must_begin_within_the_grace_period(
    tmp_path: Path, grace: float, is_retried: bool
) -> None:
    """Once the run is asked to stop."""
    config = toy_config(tmp_path)
    with StopHandler(grace) as stopping, stage_of(run_of(config, tmp_path, stopping)):
        assert storage_failed(None, None, FAILED)
        stopping.ask("cancelled")
        assert stopping.wait(20)
        assert storage_failed(None, None, FAILED) is is_retried
